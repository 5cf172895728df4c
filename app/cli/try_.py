"""try: a kernel of your own, from a file: is it right, how fast is it, and what to do next."""

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shakespeare.app.cli import options, watch
from shakespeare.app.cli.part import InferenceOptions, inference_options, run_inference
from shakespeare.app.cli.terminal import notice, to_type
from shakespeare.attention_ext.cuda.kernels import KERNELS
from shakespeare.attention_ext.parts import Dtype

if TYPE_CHECKING:  # they import numpy
    from shakespeare.judge.speed import Size
    from shakespeare.judge.verdict import Checker, Verdict

Stop = Callable[[], bool] | None
# Options that do not go with --inference, and that go with it too.
TIMED = {"N", "d", "heads", "causal", "cachegrind", "seconds", "dtype"}
TRIAL_ONLY = TIMED | {"new", "backward", "triton", "origin", "again", "save"}
THREADS = {"show_default": "1; all cores with --inference", **options.BOUNDED}
BOTH = {"file", "threads", "as_json", "seed"}
RUNGS = [f"kernel{name}" for name in KERNELS if name.isdigit()]
DTYPE = "Format of q, k, v and the output: 16 bits for CUDA (.cu) and Triton, without gradients."
HEADER = BOTH | {"N", "d", "heads", "causal", "seconds", "device", "dtype"}  # that go with a header
DEVICE = "With a header (.h): the CPU's parts, or part 4 on an NVIDIA GPU in --dtype."


@dataclass(frozen=True)
class TryOptions(InferenceOptions):
    """The values of try's options."""

    new: Path | None
    backward: bool
    triton: bool
    origin: str | None
    dtype: str | None
    device: str
    again: bool
    N: int | None
    d: int
    heads: int | None
    causal: bool
    threads: int | None
    cachegrind: bool
    seconds: float
    save: Path | None

    def size(self, dtype: Dtype = Dtype.FP32, device: str = "cpu") -> "Size":
        """The timed call on a device of a kernel in a dtype."""
        from shakespeare.judge.speed import Size

        N, heads = (4096, 100) if device == "cuda" else (1024, 4)
        sizes = {"N": self.N or N, "heads": self.heads or heads, "threads": self.threads or 1}
        return options.made(Size, self, dtype=dtype, **sizes)

    def secret(self) -> int | None:
        """The seed of the cases, if one is given."""
        return options.secret_seed(self.seed if options.is_given("seed") else None)


@click.command("try")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@options.file("--new", "Write a working start to this file: .cpp, .ispc, .cu or .py.")
@options.flag("--backward", "Try attention_backward(), the gradients of q, k and v. In .cpp and .py.")
@options.flag("--triton", "With --new: a start in Triton (.py).")
@options.choice("--from", "origin", "With --new: a kernel of the ladder (.cu).", choices=RUNGS, default=None)
@options.choice("--dtype", DTYPE, choices=Dtype, default=None, show_default="the first that FILE takes")
@options.choice("--device", DEVICE, choices=("cpu", "cuda"))
@options.flag("--watch", "again", "Try again at every save, until Ctrl-C.")
@options.size("-N", "N", "Keys and queries of the timed call.", show_default="1024; 4096 on CUDA")
@options.width
@options.heads(show_default="4; 100 on CUDA")
@options.causal
@options.size("-t", "--threads", "Threads of the timed call.", **THREADS)
@options.flag("--cachegrind", "Simulate the timed call's caches with valgrind.")
@options.number("--seconds", "A call that takes longer is endless.", maximum=3600, above=True, default=10)
@options.file("--save", "Append a right kernel's result to this file .jsonl; bench --load ranks it.")
@inference_options
@options.gathered("chosen", TryOptions)
def attempt(file: Path | None, chosen: TryOptions) -> bool:
    """Try the attention in FILE: C++ (.cpp), ISPC (.ispc), CUDA (.cu) or Python (.py); or a score_mod (.h).

    It is compared with float64 over shapes that break kernels; the first wrong case is shown with a
    diagnosis. Sanitizers look for accesses out of bounds and for races. A right kernel is timed beside the
    parts and PyTorch, with a hint. --json prints all of it. --seed gives the cases other inputs. With
    --inference the kernel writes text. Exit code 0: right; 1: wrong, crashed or endless; 2: used wrongly.
    """
    from shakespeare.attention_ext import user_kernel
    from shakespeare.judge import ranking, starts

    new = chosen.new
    if chosen.triton and not (new and new.suffix == ".py"):
        raise click.UsageError("--triton goes with --new FILE.py only")
    origin = chosen.origin
    if origin and not (new and new.suffix == ".cu"):
        raise click.UsageError("--from goes with --new FILE.cu only")
    if chosen.backward:
        options.refuse(("dtype",), "does not go with --backward")
    if new:
        if file:
            raise click.UsageError("FILE does not go with --new")
        user_kernel.check_name(new, chosen.backward)
        kernel = origin and origin.removeprefix("kernel")
        written = starts.write(new, chosen.backward, chosen.triton, kernel, chosen.dtype)
        option = " --backward" if chosen.backward else ""
        option += f" --dtype {chosen.dtype}" if chosen.dtype else ""
        notice(
            f"Wrote {' and '.join(map(str, written))}. Now: {to_type()} try {shlex.quote(str(new))}{option}"
        )
        return True
    if file is None:
        raise click.UsageError("Missing argument 'FILE'.")
    if file.suffix != ".h":
        user_kernel.check_name(file, chosen.backward)
    if not file.is_file():
        raise click.UsageError(f"FILE is {str(file)!r}; there is no such file")
    if file.suffix == ".h":
        return try_header(file, chosen)
    options.refuse(("device",), "goes with a header (.h) only")
    device = user_kernel.read(file).device
    if chosen.inference:
        options.refuse(TRIAL_ONLY, "does not go with --inference")
        threads = options.threads_for(chosen.threads)
        from shakespeare.generation.engines.engine import EngineOptions

        engine = options.made(EngineOptions, chosen, part=str(file), device=device, threads=threads)
        run_inference(chosen, engine)
        return True
    options.refuse_others(TRIAL_ONLY | BOTH | {"inference"}, "goes with --inference only")
    secret = chosen.secret()
    if chosen.save:
        ranking.check_file(chosen.save)
    if chosen.again:
        options.refuse(("as_json",), "does not go with --watch")
    size = chosen.size(user_kernel.dtype_for(file, chosen.dtype), device)
    return try_once(file, size, chosen, secret)


def try_header(file: Path, chosen: TryOptions) -> bool:
    """Try a change of scores, for attention's score_mod, and print the report."""
    from shakespeare.attention_ext.cuda import driver
    from shakespeare.judge import cases, report, speed

    options.refuse_others(HEADER, "does not go with a header")
    device = chosen.device
    if device == "cuda":
        driver.check_gpu()
    else:
        options.refuse(("dtype",), "goes with --device cuda only, with a header")
    size = chosen.size(Dtype(chosen.dtype or Dtype.FP32), device)
    words = map(str, (chosen.seconds, cases.seed_of(file, chosen.secret()), device))
    module = "shakespeare.judge.score_mod"
    found = speed.from_process(module, file, size, None, "it was not tried", *words)
    if not isinstance(found, dict):
        found = {"wrong": found.sentence, "at": "a case"}
    result = {"file": str(file), "right": not found["wrong"], **found}
    click.echo(json.dumps(result) if chosen.as_json else report.header(file, found, size, device))
    return not found["wrong"]


def try_once(file: Path, size: "Size", chosen: TryOptions, secret: int | None) -> bool:
    """Try the file and print the report; with --watch once more at each save."""
    from shakespeare.attention_ext.build.cache import saves
    from shakespeare.judge import cases, report
    from shakespeare.judge.verdict import Checker

    watched = {file}
    with contextlib.closing(Checker()) as checker:
        while True:
            before = saves(watched)
            begin = time.time_ns()
            start = time.perf_counter()
            seed = cases.seed_of(file, secret)
            verdict = checker.check(file, chosen.seconds, seed, chosen.backward, dtype=Dtype(size.dtype))
            if not chosen.as_json:
                click.echo(report.verdict(file, verdict, size))
            if not chosen.again:
                return explain(checker, file, verdict, size, chosen)
            notice(f"verdict after {time.perf_counter() - start:.2f} s")
            watched = {file, *verdict.sources}
            if verdict.refused:  # perhaps for a file that is missing beside it
                watched.update((file.parent, *file.parent.iterdir()))
            for path, save in saves(watched - before.keys()).items():
                if save[0] < begin:
                    before[path] = save

            # a save does not wait for what a compiler still does for the last one
            over = threading.Event()
            arguments = checker, file, verdict, size, chosen, over.is_set
            threading.Thread(target=explain, args=arguments, daemon=True).start()
            try:
                checker.warm(file)
                now = saves(watched)
                while file not in now or now == before:
                    time.sleep(watch.POLL_SECONDS)
                    now = saves(watched)
            finally:
                over.set()  # also at Ctrl-C
            click.echo("")


def explain(
    checker: "Checker", file: Path, verdict: "Verdict", size: "Size", chosen: TryOptions, stop: Stop = None
) -> bool:
    """Print sanitizers, speed, hint; return whether the kernel passes. stop: the file was saved again."""
    from shakespeare.judge import ranking, report
    from shakespeare.judge.speed import Figures
    from shakespeare.lab.subprocesses import Stopped

    def echo(text: str) -> None:
        if text and not chosen.as_json and not (stop and stop()):
            click.echo(text)

    try:
        for name in checker.examine(file, verdict, size, stop):
            echo(getattr(report, name)(file, verdict, size))
    except Stopped:
        return False
    if isinstance(verdict.figures, Figures):
        if chosen.save:
            echo(report.line("saved", ranking.keep(file, verdict, size, chosen.save)))
        else:
            echo(report.line("save", ranking.HOW))
    if chosen.as_json:
        click.echo(json.dumps(report.as_json(file, verdict, size), default=vars))
    if stop and not stop():
        notice(f"waiting for {file.name} to be saved (Ctrl-C ends)")
    return verdict.passes
