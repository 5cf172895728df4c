"""Attention against PyTorch and ONNX Runtime: one process, verified, interleaved, medians.

    python benchmarks/attention.py [-N 128,1024] [-d 32,64,128] [--threads 1] [--simd ispc,portable]

Each contender gets the inputs in the layout it likes best, and its result is held against float64
before it is timed. GFLOP/s count useful work, 4 B H N^2 d, half of it with a causal mask; the peak is
this machine's, measured in the same run. Where other processes take processor time it says so.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from attention_ext import PARTS, SIMD, attention, build, reference  # noqa: E402
from machine import Load, end, fma_peak  # noqa: E402

B, H = 1, 4
TOLERANCE = 1e-4  # of the largest expected value: what is off by more is wrong, not slow

Contender = Callable[[], Tensor]


def numbers(context: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    """'32,64' as [32, 64]."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise click.BadParameter(f"{text!r} must be whole numbers of at least 1, separated by commas")
    return values


def contenders(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, simds: list[str], parts: list[str]
) -> dict[str, Contender]:
    """Who takes part: name -> a call that gives the output (B, H, Nq, d)."""
    calls: dict[str, Contender] = {}
    single = q.shape[2] == 1  # one query sees all keys, whatever the mask
    calls["SDPA"] = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal and not single)
    for part in parts:
        if PARTS[part].operator is None:
            calls["part0"] = partial(attention, part, q, k, v, causal=causal)
            continue
        for simd in simds:
            name = part if len(simds) == 1 else f"{part} {simd}"
            calls[name] = partial(attention, part, q, k, v, causal=causal, simd=simd)
    onnx = onnx_attention(q, k, v, causal and not single)
    if onnx is not None:
        calls["ONNX Runtime"] = onnx
    return calls


def onnx_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Contender | None:
    """ONNX Runtime's MultiHeadAttention on inputs (B, N, H d), its own layout; None if not installed."""
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        return None
    d = q.shape[3]
    node = helper.make_node(
        "MultiHeadAttention", ["q", "k", "v"], ["o"], domain="com.microsoft",
        num_heads=H, scale=d**-0.5, unidirectional=int(causal),
    )  # fmt: skip
    value = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [B, t.shape[2], H * d])
        for n, t in (("q", q), ("k", k), ("v", v), ("o", q))
    ]
    graph = helper.make_graph([node], "attention", value[:3], value[3:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    feed = {n: t.transpose(1, 2).reshape(B, -1, H * d).numpy() for n, t in (("q", q), ("k", k), ("v", v))}

    def call() -> Tensor:
        out = torch.from_numpy(session.run(None, feed)[0])
        return out.view(B, -1, H, d).transpose(1, 2)

    return call


def measure(calls: dict[str, Contender], rounds: int, least: float = 0.01) -> dict[str, list[float]]:
    """Seconds per call, `rounds` for each contender, taken in turn; short calls are repeated to `least`."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, round(least / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            seconds[name].append((time.perf_counter() - start) / repeats[name])
    return seconds


def row(name: str, times: list[float], sdpa: float, flops: float, peak: float, error: float) -> str:
    """One line of the table."""
    middle = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    return (
        f"| {name} | {1e3 * middle:.3f} | {100 * (high - low) / middle:.0f} % | {flops / middle / 1e9:.0f} "
        f"| {100 * flops / middle / peak:.0f} % | {sdpa / middle:.2f} | {error:.0e} |"
    )


@click.command()
@click.option("-N", "lengths", default="128,1024", show_default=True, callback=numbers, help="Lengths.")
@click.option("-d", "widths", default="32,64,128", show_default=True, callback=numbers, help="Head widths.")
@click.option("--queries", type=click.IntRange(1), help="Queries, if not as many as keys.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of each.")
@click.option("--rounds", type=click.IntRange(2), default=15, show_default=True, help="Times each is timed.")
@click.option("--parts", default=",".join(PARTS), show_default=True, help="Parts that take part.")
@click.option("--simd", default="auto", show_default=True, help=f"Helpers, of {', '.join(SIMD)}.")
def main(lengths: list[int], widths: list[int], queries: int | None, threads: int, rounds: int, parts: str,
         simd: str) -> None:  # fmt: skip
    """Time the parts against PyTorch's SDPA and ONNX Runtime; prints a Markdown table for each case."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    simds, chosen = simd.split(","), parts.split(",")
    for name, known in [(s, SIMD) for s in simds] + [(p, tuple(PARTS)) for p in chosen]:
        if name not in known:
            raise click.UsageError(f"{name!r} must be one of {', '.join(known)}")
    click.echo(f"{', '.join(build.describe(s) for s in simds)}; PyTorch {torch.__version__}")
    load = Load()  # from here: the compilers are done
    peaks = [fma_peak(simds[0])]
    with torch.inference_mode():
        for N in lengths:
            for d in widths:
                for causal in (False, True):
                    case(N, d, causal, queries or N, rounds, simds, chosen, threads * peaks[0])
    peaks.append(fma_peak(simds[0]))
    end(load, peaks, threads)


def case(N: int, d: int, causal: bool, Nq: int, rounds: int, simds: list[str], parts: list[str],
         peak: float) -> None:  # fmt: skip
    """Verify, time and print one case."""
    if causal and Nq not in (1, N):
        raise click.UsageError("PyTorch's causal mask is another one where queries and keys differ")
    q, k, v = (torch.randn(B, H, n, d) for n in (Nq, N, N))
    exact, _ = reference.flash_attention(q.double(), k.double(), v.double(), causal=causal)  # (B, H, Nq, d)
    calls = contenders(q, k, v, causal, simds, parts)
    errors = {name: float((call() - exact).abs().max()) for name, call in calls.items()}
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE * float(exact.abs().max())]
    seconds = measure({name: call for name, call in calls.items() if name not in wrong}, rounds)
    flops = 4.0 * B * H * Nq * N * d * (0.5 if causal and Nq == N else 1.0)
    sdpa = statistics.median(seconds["SDPA"])
    click.echo(f"\nN={N}, d={d}, {Nq} queries, {'causal' if causal else 'no mask'}\n")
    click.echo("| contender | ms | spread | GFLOP/s | of peak | SDPA = 1 | error |")
    click.echo("|---|---|---|---|---|---|---|")
    for name, times in seconds.items():
        click.echo(row(name, times, sdpa, flops, peak, errors[name]))
    for name in wrong:
        click.echo(f"| {name} | wrong, so not timed | | | | | {errors[name]:.0e} |")


if __name__ == "__main__":
    main()
