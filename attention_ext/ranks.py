"""Joins the processes that torchrun started, and names a lost one.

When an exchange fails, each rank reports itself in torchrun's store and closes its connections, so that the
ranks that wait for it fail too. A rank that does not answer in time was killed or stalled.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shakespeare.attention_ext.checks import finite, first_line, none_is_default

log = logging.getLogger(__name__)
HERE = "here"  # the answer of a rank that has not failed itself
ABORT = 2.0  # seconds that NCCL's abort may take
ROLL_CALL = 5.0  # seconds that a rank waits for the others' answers, at most the timeout


class LostRank(RuntimeError):
    """Another rank was killed, stalled or failed; the message names it."""


@dataclass(frozen=True)
class Ranks:
    """This process among the others. local: ranks on this host."""

    rank: int
    count: int
    local: int
    device: torch.device


@none_is_default
@contextlib.contextmanager
def join(device: str = "cpu", timeout: float = 30.0) -> Iterator[Ranks]:
    """The process group of all ranks: gloo for tensors on the CPU; with 'cuda' NCCL for those on GPUs.

    With 'cuda' the rank's GPU is LOCAL_RANK; messages and meet() still go over gloo. timeout: seconds that a
    rank waits in one exchange. If a rank is killed, stalls or raises an error in the block, every other one
    leaves the block with a LostRank that names it, at most timeout + ROLL_CALL seconds after it began to
    wait, or ends with the same message when torchrun sends SIGTERM.
    """
    timeout = finite("timeout", timeout)
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError("started without torchrun: python -m torch.distributed.run --nproc-per-node P ...")
    rank = int(os.environ["RANK"])
    count = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        if not torch.cuda.is_available() or where.index >= torch.cuda.device_count():
            raise ValueError(f"rank {rank} has no GPU: this host has {torch.cuda.device_count()}")
        torch.cuda.set_device(where)
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a wait ends, and no watchdog aborts
    roll = RollCall(rank, count, min(timeout, ROLL_CALL))
    backend, bound = ("cpu:gloo,cuda:nccl", where) if device == "cuda" else ("gloo", None)
    with roll.on_sigterm():
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=bound)
            yield Ranks(rank, count, local, where)
            meet()  # a rank that fails at the end is still named
        except (SystemExit, KeyboardInterrupt):
            _abort_nccl(where)
            raise
        except BaseException as error:
            roll.lock.acquire()  # never released: this thread reports, not the watching one
            # gloo raises plain RuntimeErrors, as the CPU's allocator does
            plain = type(error) is RuntimeError and "DefaultCPUAllocator" not in str(error)
            own = not plain and not isinstance(error, dist.DistError)  # not one of an exchange
            roll.answer(f"{type(error).__name__}: {error}" if own else HERE)
            _abort_nccl(where)
            if own:
                raise
            _leave()
            raise LostRank(roll.sentence() or f"rank {rank}: {first_line(error)}") from error
        finally:
            _leave()


def meet() -> None:
    """Wait for all ranks, over gloo: NCCL's barrier would wait for a lost rank forever."""
    dist.all_reduce(torch.zeros(1))


def _abort_nccl(device: torch.device) -> None:
    """End the kernels that wait for a lost rank, if this rank has a GPU; it takes ABORT seconds at most."""
    if device.type != "cuda" or not dist.is_initialized():
        return

    def abort() -> None:
        with contextlib.suppress(RuntimeError, AttributeError):  # it may be aborted already
            dist.group.WORLD._get_backend(device).abort()  # type: ignore[union-attr]

    thread = threading.Thread(target=abort, daemon=True)
    thread.start()
    thread.join(ABORT)


def _leave() -> None:
    """Close the connections to the other ranks, if there are any."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


class RollCall:
    """Finds the ranks that are still there, by keys in the run's store."""

    def __init__(self, rank: int, count: int, patience: float) -> None:
        self.rank = rank
        self.count = count
        self.patience = patience
        self.lock = threading.Lock()
        self._run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: dist.Store | None = None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # else rank 0 opens its port later
            address = os.environ["MASTER_ADDR"]
            port = int(os.environ["MASTER_PORT"])
            self._store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=patience))

    def _key(self, rank: int) -> str:
        return f"attention/roll/{self._run}/{rank}"

    def answer(self, text: str) -> None:
        """Say that this rank is there, or how it failed."""
        if self._store is not None:
            with contextlib.suppress(dist.DistError):
                self._store.set(self._key(self.rank), first_line(RuntimeError(text)))

    def sentence(self) -> str | None:
        """Wait for the others; returns a message that names failed or silent ranks, or None."""
        if self._store is None:
            return None
        others = [rank for rank in range(self.count) if rank != self.rank]
        end = time.monotonic() + self.patience
        silent = others
        try:
            while silent and time.monotonic() < end:
                silent = [rank for rank in silent if not self._store.check([self._key(rank)])]
                time.sleep(0.05)
            answers = {r: self._store.get(self._key(r)).decode() for r in others if r not in silent}
        except dist.DistError:
            return f"the store of the run does not answer, so torchrun has ended (seen by rank {self.rank})"
        failed = [f"rank {r} failed with {text}" for r, text in answers.items() if text != HERE]
        if failed:
            return "; ".join(failed)
        names = " and ".join(f"rank {rank}" for rank in silent)
        return f"{names} did not answer rank {self.rank}: killed or stalled" if silent else None

    @contextlib.contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Let a thread end the process on SIGTERM: Python's own handlers wait until an exchange returns."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            if not self.lock.locked():  # else torchrun's SIGTERM could come before the message is printed
                signal.signal(signal.SIGTERM, before)
            os.close(writer)  # the thread reads the end of the file
            thread.join(timeout=1)
            os.close(reader)

    def _watch(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGINT:
                os._exit(130)
            if number[0] != signal.SIGTERM or not self.lock.acquire(blocking=False):
                continue  # another signal, or the main thread reports
            self.answer(HERE)
            sentence = self.sentence() or f"rank {self.rank} was told to end"
            log.error(sentence)
            os._exit(2)
