"""The cuda engine: model, caches and the choice of a token in one launch, csrc/cuda/cluster.cu and grid.cu.

It needs cuda-bindings and a GPU, but no PyTorch; cuda-core and NVRTC only for kernels that no wheel brings.
"""

import contextlib
import ctypes
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext import BuildError
from shakespeare.attention_ext.build import cache
from shakespeare.attention_ext.build.structs import constants, structure
from shakespeare.attention_ext.cuda.driver import Memory, launch_prepared, synchronize
from shakespeare.attention_ext.parts import Precision
from shakespeare.generation.engines import layouts
from shakespeare.generation.engines.engine import EngineOptions, Floats
from shakespeare.generation.engines.layouts import Grid, Launch, Layout
from shakespeare.generation.engines.slots import PLACES, ROW, Prompt, Slots
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.config import EMBEDDING
from shakespeare.model.draft import ORDER, Draft

if TYPE_CHECKING:
    from shakespeare.model.gpt import GPT

LEAST_HITS = 0.47  # of guesses: with fewer, a pass gives less than 1.8 tokens
TRIED = 32  # guesses of a text, before they are judged
SECONDS = 0.0075  # of a launch by default, less than the 0.01 in which Ctrl-C should take effect
FIRST_ROW_SECONDS = 2e-5  # for each text of a multiprocessor: the guess before one was measured
HEADER = layouts.SOURCES / "decoder.h"
TEXT = np.dtype(structure(HEADER, "Text"))
Work = structure(HEADER, "Work")
FLAGS = constants(HEADER)  # of a Text
FIRST = FLAGS["FIRST"]
LAST = FLAGS["LAST"]

_lock_folders: set[Path] = set()  # whose owner was checked


@contextlib.contextmanager
def turn(identity: str) -> Iterator[None]:
    """Have a GPU alone among the launches of all processes that take turns: two at a time both end late.

    Without a directory for its lock, this process takes no turns.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, BuildError):
            directory = cache.directory()
            if directory not in _lock_folders or not directory.is_dir():
                cache.create(directory)
                _lock_folders.add(directory)
            file = stack.enter_context(open(directory / f"gpu_{identity}", "w"))
            cache.lock(file.fileno())
        yield


class CudaEngine(Slots):
    """An Engine on the first GPU. Its calls take turns.

    A text's last bits depend on the kind of launch only: alone in a cluster, with drafts or without, among
    others there, or in the grid. clocks: whether cycles() has something to tell. draft: guesses the next
    tokens of few texts, each in its own cluster. Other arguments and errors: as open_engine(), and Unfit.
    """

    name = device = "cuda"

    def __init__(
        self,
        model: "Checkpoint | GPT",
        options: EngineOptions,
        draft: Draft | None = None,
        clocks: bool = False,
    ) -> None:
        c = model.config
        slots = options.slots
        capacity = options.context(c)
        precisions = options.weights, options.kv_cache
        on = self._gpu = layouts.device()
        on.activate()
        shared = on.on.shared
        super().__init__(c, slots, capacity)
        clusters, self._grid = layouts.layouts_for(c, *precisions, on.on, clocks)
        self._reader = Grid(c, *precisions, prompt=True, clocks=clocks)
        self._many = self._grid.most_texts(shared)  # texts in a block of the grid
        self._read_together = self._reader.most_texts(shared)  # tokens of a prompt in a block
        drafts = draft is not None
        alone = clusters[0].alone(drafts, shared) if clusters else (self._grid, layouts.GRID_TEXTS[0])
        on.prepare([(self._reader, self._read_together), alone])
        self._clusters = list(itertools.dropwhile(lambda layout: not on.clusters(layout, drafts), clusters))
        self._read_blocks = on.resident(self._reader, self._read_together)  # of prompts at a time
        self._at_once = self._read_together * self._read_blocks
        used: tuple[Layout, ...] = (*self._clusters, self._grid)
        tensors = model.weights
        self._weights = {layout: Memory.from_array(layout.pack(tensors)) for layout in used}
        self._weights[self._reader] = self._weights[self._grid]
        for layout in self._clusters[:1]:
            self._weights[replace(layout, drafts=True)] = self._weights[layout]
        self._tokens = Memory.from_array(tensors[EMBEDDING])
        self._positions = Memory.from_array(tensors["transformer.wpe.weight"][:capacity])
        V = c.vocab_size
        cached = c.n_embd * c.n_layer * capacity * options.kv_cache.bytes
        # Bytes of a slot of each array of struct Work.
        self._sizes = {
            "keys": cached,
            "values": cached,
            "logits": 4 * V,
            "seen": 4 * V,
            "written": 4 * V,
            "sampling": 8 * ROW,
            "bias": 8 * V,
        }
        self._arrays = {name: Memory(slots * size) for name, size in self._sizes.items()}
        # Arguments of a launch on the host and the GPU: of texts, and of prompts.
        self._arguments = {
            prompts: (Memory(1 << 16, host=True), Memory(1 << 16)) for prompts in (False, True)
        }
        self._chosen = Memory(1 << 12, host=True)
        self._cycles = Memory(8 * len(layouts.PHASES), host=True)
        self._every = Memory(4)
        self._arrived = Memory(4 * on.on.multiprocessors * layouts.RESIDENT)
        self._work = Work(
            **{name: memory.address for name, memory in self._arrays.items()},
            tokens=self._tokens.address,
            positions=self._positions.address,
            cycles=self._cycles.address,
            arrived=self._arrived.address,
            capacity=capacity,
            scale=1 / (math.sqrt(c.head_dim) * math.log(2)),
        )
        self._work_at = (ctypes.c_void_p * 1)(ctypes.addressof(self._work))
        self._launches: dict[int, Launch] = {}  # of so many texts; to find one takes longer than a token
        self._row_seconds: dict[Launch, float] = {}
        self._drafted: dict[Launch, Launch] = {}  # of one without drafts
        self._tails = np.zeros((slots, ORDER), np.int64)  # of each slot the last tokens, the latest one last
        self._guessed = np.zeros((slots, 2))  # of each slot's text: guesses that were compared, and hits
        self._kept += [self._tails, self._guessed]
        self.draft = draft
        if draft is not None:
            self._tags = Memory.from_array(draft.tags)
            self._pairs = Memory.from_array(draft.pairs)
            self._work.tags = self._tags.address
            self._work.pairs = self._pairs.address
        self._counted = np.zeros((0, 2), np.int32)  # of the last launch, as struct Work has them
        # Compiled now, not while texts wait: what as many texts as there are slots need, or fewer.
        largest = min(slots, self._many * layouts.RESIDENT * on.on.multiprocessors)  # more need the same
        on.prepare(self._launch_for(np.arange(count))[:2] for count in range(1, largest + 1))

    @property
    def description(self) -> str:
        """What computes the texts, in a line for people."""
        where = self._gpu.on.name
        if self._clusters:
            layout = self._clusters[0]
            where = f"{self._gpu.clusters(layout)} clusters of {layout.blocks} blocks of {where}"
        return f"The whole model in one launch, part 4's attention, on {where}"

    def begin(self, slot: int, ids: Sequence[int], continues: bool = False, top: int | None = None) -> None:
        super().begin(slot, ids, continues, top)
        with self._lock:
            self._tails[slot, -len(ids) :] = ids[-ORDER:]
            if not continues:
                self._guessed[slot] = 0

    def _read_piece(self, slot: int, prompt: Prompt) -> tuple[int, Floats | None]:
        ids, continues, top, done = prompt
        piece = ids[done : done + self._at_once]
        texts = np.zeros(len(piece), TEXT)
        texts["slot"] = slot
        texts["token"] = piece
        texts["length"] = np.arange(done, done + len(piece))
        texts["flags"][0] = FIRST * (done == 0 and not continues)
        done += len(piece)
        texts["flags"][-1] |= LAST * (done == len(ids))
        self._launch_prompts(texts, top is not None)
        return done, None if top is None else self._every_logits(len(piece))

    def _read_prompts(self) -> None:
        """Read the prompts that wait, as many as possible in a launch; a block has tokens of one prompt."""
        self._gpu.activate()
        if len(self._prompts) < 2:  # faster than below
            for slot, prompt in self._prompts.items():
                self._read_piece(slot, prompt)
            self._prompts.clear()
            return
        of_block = self._read_together
        waiting = self._prompts
        self._prompts = {}
        slots = np.fromiter(waiting, np.int32)
        tokens = np.fromiter((len(prompt.ids) for prompt in waiting.values()), np.int64)
        continued = np.fromiter((prompt.continues for prompt in waiting.values()), bool)
        ids = itertools.chain.from_iterable(prompt.ids for prompt in waiting.values())
        ends = np.cumsum(-(-tokens // of_block))  # in blocks
        first = 0
        while first < len(slots):
            before = ends[first - 1] if first else 0
            last = int(np.searchsorted(ends, before + self._read_blocks, "right"))
            lengths = tokens[first:last]
            position = np.arange(-(-lengths.max() // of_block) * of_block, dtype=np.int32)
            used = position < lengths[:, None]
            texts = np.zeros(used.shape, TEXT)
            texts["slot"] = np.where(used, slots[first:last, None], -1)
            texts["length"] = position
            texts["token"][used] = np.fromiter(ids, np.int32, int(lengths.sum()))
            texts["flags"][:, 0] = FIRST * ~continued[first:last]
            texts["flags"][np.arange(len(lengths)), lengths - 1] |= LAST
            of_blocks = texts.reshape(-1, of_block)
            self._launch_prompts(of_blocks[of_blocks["slot"][:, 0] >= 0].reshape(-1), False)
            first = last

    def _launch_prompts(self, texts: NDArray[Any], every: bool) -> None:
        """Read tokens of prompts: (count,) of TEXT, in each block those of one."""
        self._gpu.activate()
        blocks = -(-len(texts) // self._read_together)
        self._launch(Launch(self._reader, self._read_together, blocks, blocks), texts, None, every)

    def _write(
        self, at: NDArray[np.int64], numbers: NDArray[np.float64], seconds: float | None, scored: bool
    ) -> tuple[NDArray[np.int32], Floats]:
        texts = np.zeros(len(at), TEXT)
        texts["slot"] = at
        texts["length"] = self._lengths[at]
        texts["token"] = self._pending[at]
        launch = self._launch_for(at)
        if launch.drafts:
            tails = self._tails[at].astype(np.uint32)
            before = np.where(self._pending[at, None] < 0, tails[:, 1:], tails[:, :-1])
            shifted = before << np.array([24, 16, 8, 0], np.uint32)
            texts["flags"] = shifted.sum(1, dtype=np.uint32).view(np.int32)
        seconds = SECONDS if seconds is None else seconds
        guess = FIRST_ROW_SECONDS * max(1.0, len(at) / self._gpu.on.multiprocessors)
        fit = int(min(len(numbers), max(1, seconds / self._row_seconds.get(launch, guess))))
        chosen = self._launch(launch, texts, numbers[:fit], scored, seconds > SECONDS)
        self._tails[at] = np.concatenate([self._tails[at], chosen[-ORDER:].T], axis=1)[:, -ORDER:]
        if launch.drafts:
            self._guessed[at, 0] += self._counted[:, 1]
            self._guessed[at, 1] += fit - self._counted[:, 0]
        every = self._every_logits(chosen.size if scored else 0)
        return chosen, every.reshape(-1, len(at), self.config.vocab_size)

    def _copy(self, source: int, at: NDArray[np.int64]) -> None:
        prompt = self._prompts.get(source, Prompt([], True))
        blocks = -(-len(prompt.ids) // self._read_together)
        # Prompts that fit a launch are read in the time of one, and a slot's copy takes several calls.
        if not prompt.continues and blocks * (1 + len(at)) <= self._read_blocks:
            self._prompts.update(dict.fromkeys(at.tolist(), prompt))
            return
        self._read_prompts()
        for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1):
            self._copy_to_run(source, run)

    def _copy_to_run(self, source: int, run: NDArray[Any]) -> None:
        """Copy a slot to neighbouring ones: to the first, from there to the next, to two, four ..."""
        for name in ("keys", "values", "logits", "seen", "written"):
            size = self._sizes[name]
            origin = source
            done = 0
            while done < len(run):
                count = min(max(done, 1), len(run) - done)
                to = int(run[done]) * size
                self._arrays[name].copy_async(to, int(origin) * size, count * size, self._gpu.stream)
                origin = run[0]
                done += count

    def _logits_of(self, slot: int) -> Floats:
        self._read_prompts()
        synchronize(self._gpu.stream)
        row = np.empty(self.config.vocab_size, np.float32)
        return self._arrays["logits"].read(row, slot * self._sizes["logits"])

    def cycles(self) -> dict[str, int]:
        """The cycles of each of layouts.PHASES in the last launch, in the first block."""
        return dict(zip(layouts.PHASES, self._cycles.bytes.view(np.int64).tolist()))

    def _every_logits(self, rows: int) -> Floats:
        """The logits that the last launch kept, (rows, vocab_size)."""
        synchronize(self._gpu.stream)
        return self._every.read(np.empty((rows, self.config.vocab_size), np.float32))

    def _launch_for(self, at: NDArray[np.int64]) -> Launch:
        """The launch that writes these texts: with drafts, if each has a cluster of its own and guesses hit.

        Penalties count the tokens before a row, which a row of guesses does not know. Counts decide, not
        times, which change from run to run.
        """
        count = len(at)
        if count not in self._launches:
            self._launches[count] = self._plain_launch(count)
        plain = self._launches[count]
        # In clusters of eight, for more texts in bf16, a pass of four rows gains nothing on an H100.
        if self.draft is None or plain.texts > 1 or plain.layout not in self._clusters[:1]:
            return plain
        if plain not in self._drafted:
            drafted = self._clusters[0].alone(True, self._gpu.on.shared)
            self._drafted[plain] = Launch(*drafted, plain.blocks, plain.leading)
        if self._settings["sampling"][at, PLACES["ADJUSTED"]].any():
            return plain
        guesses, hits = self._guessed[at].sum(0)
        return plain if guesses >= TRIED * count and hits < LEAST_HITS * guesses else self._drafted[plain]

    def _plain_launch(self, count: int) -> Launch:
        """The launch without drafts of so many texts: a pass of clusters, if they suffice, else the grid."""
        on = self._gpu.on
        best: Launch | None = None
        for layout in self._clusters:
            if best and best.texts == 1:
                break
            at_a_time = self._gpu.clusters(layout)
            together = -(-count // at_a_time) if at_a_time else math.inf
            if together <= layout.most_texts(on.shared) and (not best or together < best.texts):
                blocks = -(-count // int(together)) * layout.blocks
                best = Launch(layout, int(together), blocks, blocks)
        if best:
            return best
        for texts in layouts.GRID_TEXTS:
            resident = self._gpu.resident(self._grid, texts)
            if texts == self._many or count <= texts * resident:
                break
        blocks = min(-(-count // texts), resident)
        # Where the tensor cores multiply, there is too little to do beside the reading of keys to take turns.
        turns = blocks > on.multiprocessors and self._grid.weights is Precision.FP32
        return Launch(self._grid, texts, blocks, -(-blocks // 2) if turns else blocks)

    def _launch(
        self,
        launch: Launch,
        texts: NDArray[Any],
        uniforms: NDArray[np.float64] | None,
        every: bool,
        long: bool = False,
    ) -> NDArray[np.int32]:
        """Write a row of tokens for each row of uniforms and wait, or without uniforms begin to read prompts.

        texts: (count,) of TEXT. every: keep the logits of every row. long: whether processes take turns.
        Returns the tokens, (rows, count).
        """
        count = len(texts)
        stream = self._gpu.stream
        work = self._work
        for name in self._stale:
            self._arrays[name].write(self._settings[name])
        self._stale.clear()
        prompts = uniforms is None
        rows = 1 if uniforms is None else len(uniforms)
        used = texts.nbytes + (0 if uniforms is None else uniforms.nbytes)
        if prompts:  # the launch before this may still read its arguments
            synchronize(stream)
        if used > self._arguments[prompts][0].size:
            self._arguments[prompts] = Memory(2 * used, host=True), Memory(2 * used)
        host, staged = self._arguments[prompts]
        size = 4 * rows * count
        counts = 8 * count
        if size + counts > self._chosen.size:
            self._chosen = Memory(2 * (size + counts), host=True)
        if every and size * self.config.vocab_size > self._every.size:
            self._every = Memory(size * self.config.vocab_size)
        host.bytes[: texts.nbytes] = texts.view(np.uint8)
        if uniforms is not None:
            host.bytes[texts.nbytes : used].view(float).reshape(uniforms.shape)[:] = uniforms
        work.weights = self._weights[launch.layout].address
        work.every = self._every.address if every else None
        work.texts = staged.address
        work.uniforms = staged.address + texts.nbytes
        work.count = count
        work.rows = rows
        work.leading = launch.leading
        work.chosen = self._chosen.address
        work.drafts = self._chosen.address + size
        function, _ = self._gpu.kernel(launch.layout, launch.texts)
        config = self._gpu.launch(*launch[:3])
        staged.write_async(host, used, stream)
        self._arrived.clear_async(stream)
        with turn(self._gpu.on.identity) if long else contextlib.nullcontext():
            start = time.perf_counter()
            launch_prepared(config, function, self._work_at)
            if not prompts:
                synchronize(stream)
                self._row_seconds[launch] = (time.perf_counter() - start) / rows
        if launch.drafts:
            self._counted = self._chosen.bytes[size : size + counts].view(np.int32).reshape(count, 2).copy()
        return self._chosen.bytes[:size].view(np.int32).reshape(rows, count).copy()
