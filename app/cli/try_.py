"""try: a kernel of your own, from a file: is it right, how fast is it, and what to do next."""

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shakespeare.app.cli import options, watch
from shakespeare.app.cli.part import Session, converse, inference_options, write
from shakespeare.app.cli.terminal import notice, to_type
from shakespeare.attention_ext.cuda.kernels import KERNELS
from shakespeare.attention_ext.parts import Dtype

Stop = Callable[[], bool] | None
# Options of the engine that a file does not take, as open_engine() has them by default.
FIXED = {"simd": "auto", "br": None, "bc": None, "kernel": None}
# Options that do not go with --inference, and that go with it too.
TIMED = {"N", "d", "heads", "causal", "cachegrind", "seconds", "dtype"}
OWN = TIMED | {"new", "backward", "triton", "origin", "again", "save"}
THREADS = {"show_default": "1; all cores with --inference", **options.BOUNDED}
BOTH = {"file", "threads", "as_json", "seed"}
RUNGS = [f"kernel{name}" for name in KERNELS if name.isdigit()]
DTYPE = "Format of q, k, v and the output: 16 bits for CUDA (.cu) and Triton, without gradients."
HEADER = BOTH | {"N", "d", "heads", "causal", "seconds"}  # that go with a header


@click.command("try")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@options.file("--new", "Write a working start to this file: .cpp, .ispc, .cu or .py.")
@options.flag("--backward", "Try attention_backward(), the gradients of q, k and v. In .cpp and .py.")
@options.flag("--triton", "With --new: a start in Triton (.py).")
@options.choice("--from", "origin", "With --new: a kernel of the ladder (.cu).", of=RUNGS, default=None)
@options.choice("--dtype", DTYPE, of=Dtype, default=None, show_default="the first that FILE takes")
@options.flag("--watch", "again", "Try again at every save, until Ctrl-C.")
@options.size("-N", "N", "Keys and queries of the timed call.", show_default="1024; 4096 on CUDA")
@options.width
@options.heads(show_default="4; 100 on CUDA")
@options.causal
@options.size("-t", "--threads", "Threads of the timed call.", **THREADS)
@options.flag("--cachegrind", "Simulate the timed call's caches with valgrind.")
@options.number("--seconds", "A call that takes longer is endless.", most=3600, above=True, default=10)
@options.file("--save", "Append a right kernel's result to this file .jsonl; bench --load ranks it.")
@inference_options
def attempt(file: Path | None, new: Path | None, again: bool, threads: int | None, **asked: Any) -> bool:
    """Try the attention in FILE: C++ (.cpp), ISPC (.ispc), CUDA (.cu) or Python (.py); or a score_mod (.h).

    It is compared with float64 over shapes that break kernels; the first wrong case is shown with a
    diagnosis. Sanitizers look for accesses out of bounds and for races. A right kernel is timed beside the
    parts and PyTorch, with a hint. --json prints all of it. --seed gives the cases other inputs. With
    --inference the kernel writes text. Exit code 0: right; 1: wrong, crashed or endless; 2: used wrongly.
    """
    from shakespeare.attention_ext import user_kernel
    from shakespeare.judge import ranking, starts
    from shakespeare.judge.speed import Size

    if asked["triton"] and not (new and new.suffix == ".py"):
        raise click.UsageError("--triton goes with --new FILE.py only")
    origin = asked["origin"]
    if origin and not (new and new.suffix == ".cu"):
        raise click.UsageError("--from goes with --new FILE.cu only")
    if asked["backward"]:
        options.refuse(("dtype",), "does not go with --backward")
    if new:
        if file:
            raise click.UsageError("FILE does not go with --new")
        user_kernel.check_name(new, asked["backward"])
        kernel = origin and origin.removeprefix("kernel")
        written = starts.write(new, asked["backward"], asked["triton"], kernel, asked["dtype"])
        option = " --backward" if asked["backward"] else ""
        option += f" --dtype {asked['dtype']}" if asked["dtype"] else ""
        notice(
            f"Wrote {' and '.join(map(str, written))}. Now: {to_type()} try {shlex.quote(str(new))}{option}"
        )
        return True
    if file is None:
        raise click.UsageError("Missing argument 'FILE'.")
    if file.suffix != ".h":
        user_kernel.check_name(file, asked["backward"])
    if not file.is_file():
        raise click.UsageError(f"FILE is {str(file)!r}; there is no such file")
    if file.suffix == ".h":
        return try_header(file, threads or 1, asked)
    device = user_kernel.read(file).device
    if asked["inference"]:
        options.refuse(OWN, "does not go with --inference")
        settings = asked | FIXED | {"device": device, "threads": options.threads_for(threads)}
        session = Session(str(file), settings)
        converse(session) if asked["interactive"] else write(session)
        return True
    options.refuse(asked.keys() - OWN - BOTH - {"inference"}, "goes with --inference only")
    asked["secret"] = options.secret_seed(asked["seed"] if options.given("seed") else None)
    if asked["save"]:
        ranking.check_file(asked["save"])
    if again:
        options.refuse(("as_json",), "does not go with --watch")
    asked["dtype"] = user_kernel.dtype_for(file, asked["dtype"])
    given = {name: asked[name] for name in ("d", "causal", "cachegrind", "backward", "dtype")}
    N, heads = (4096, 100) if device == "cuda" else (1024, 4)
    size = Size(N=asked["N"] or N, heads=asked["heads"] or heads, threads=threads or 1, **given)
    return try_once(file, size, asked, again)


def try_header(file: Path, threads: int, asked: dict[str, Any]) -> bool:
    """Try a change of scores, for attention's score_mod, and print the report."""
    from shakespeare.judge import cases, report, speed

    options.refuse((asked.keys() | {"again"}) - HEADER, "does not go with a header")
    size = speed.Size(asked["N"] or 1024, asked["d"], asked["heads"] or 4, asked["causal"], threads)
    seed = cases.seed_of(file, options.secret_seed(asked["seed"] if options.given("seed") else None))
    words = map(str, (asked["seconds"], seed))
    told: Any = speed.from_process(
        "shakespeare.judge.score_mod", file, size, None, "it was not tried", *words
    )
    said = told if isinstance(told, dict) else {"wrong": told.sentence, "at": "a case"}
    known = {"file": str(file), "right": not said["wrong"], **said}
    click.echo(json.dumps(known) if asked["as_json"] else report.header(file, said, size))
    return not said["wrong"]


def try_once(file: Path, size: Any, asked: dict[str, Any], again: bool) -> bool:
    """Try the file and print the report; with `again` once more at each save."""
    from shakespeare.attention_ext.build.cache import saves
    from shakespeare.judge import cases, report
    from shakespeare.judge.verdict import Checker

    watched = {file}
    with contextlib.closing(Checker()) as checker:
        while True:
            before = saves(watched)
            begin = time.time_ns()
            start = time.perf_counter()
            seed = cases.seed_of(file, asked["secret"])
            verdict = checker.check(file, asked["seconds"], seed, asked["backward"], dtype=asked["dtype"])
            if not asked["as_json"]:
                click.echo(report.verdict(file, verdict, size))
            if not again:
                return explain(checker, file, verdict, size, asked)
            notice(f"verdict after {time.perf_counter() - start:.2f} s")
            watched = {file, *verdict.sources}
            if verdict.refused:  # perhaps for a file that is missing beside it
                watched.update((file.parent, *file.parent.iterdir()))
            for path, save in saves(watched - before.keys()).items():
                if save[0] < begin:
                    before[path] = save

            # a save does not wait for what a compiler still does for the last one
            over = threading.Event()
            given = checker, file, verdict, size, asked, over.is_set
            threading.Thread(target=explain, args=given, daemon=True).start()
            try:
                checker.warm(file)
                while file not in (now := saves(watched)) or now == before:
                    time.sleep(watch.POLL_SECONDS)
            finally:
                over.set()  # also at Ctrl-C
            click.echo("")


def explain(
    checker: Any, file: Path, verdict: Any, size: Any, asked: dict[str, Any], stop: Stop = None
) -> bool:
    """Print sanitizers, speed, hint; return whether the kernel passes. stop: the file was saved again."""
    from shakespeare.judge import ranking, report
    from shakespeare.judge.speed import Figures
    from shakespeare.lab.command import Stopped

    def say(text: str) -> None:
        if text and not asked["as_json"] and not (stop and stop()):
            click.echo(text)

    try:
        for name in checker.examine(file, verdict, size, stop):
            say(getattr(report, name)(file, verdict, size))
    except Stopped:
        return False
    if isinstance(verdict.figures, Figures):
        if asked["save"]:
            say(report.line("saved", ranking.keep(file, verdict, size, asked["save"])))
        else:
            say(report.line("save", ranking.HOW))
    if asked["as_json"]:
        click.echo(json.dumps(report.as_json(file, verdict, size), default=vars))
    if stop and not stop():
        notice(f"waiting for {file.name} to be saved (Ctrl-C ends)")
    return verdict.passes
