"""The operators in PyTorch: schemas, fake implementations, compilation, checks, memory, the GIL."""

import sys
import threading

import oracle
import pytest
import torch
from support import KERNELS, full
from torch import library as torch_library

from shakespeare.attention_ext import PARTS, attention, operator


def arguments(kernel, **change):
    values = dict(zip("qkv", oracle.qkv(1, 2, 20, 30, 8)), causal=True, scale=0.3, return_lse=True)
    values |= dict(br=8, bc=16) if PARTS[kernel].tiled else {}
    return tuple((values | change).values())


@pytest.mark.parametrize(
    "kernel, dtype",
    [
        ("part4", torch.float32),
        full("part4", torch.bfloat16),
        *(full(kernel, torch.float32) for kernel in KERNELS[:-1]),
    ],
)
def test_opcheck_and_compiling_without_a_graph_break(kernel, dtype, extension):
    q, k, v = (torch.randn(1, 40, 2, 8).to(dtype).transpose(1, 2) for _ in range(3))
    for change in (dict(return_lse=False), dict(q=q[:, :, :1])):
        torch_library.opcheck(operator(kernel), arguments(kernel, **dict(q=q, k=k, v=v) | change))

    def layer(q, k, v):
        return attention(kernel, q * 2, k, v, causal=True) + 1

    expected = layer(q, k, v)  # builds the extension, which torch.compile cannot do
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), expected)
    other = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    for br in (None, 1):  # calls of another kind
        attention("part0", other, other, other, br=br, softcap=br)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(q, k, v)


def test_an_operator_called_directly_checks_too(kernel):
    for change, message in (
        (dict(q=torch.zeros(1, 2, 20)), r"q has shape \(1, 2, 20\); it must be \(any, any, any, any\)"),
        (dict(k=torch.zeros(1, 2, 30, 8).double()), "k must be float32 on the CPU"),
        (dict(v=torch.zeros(1, 2, 0, 8)), r"v has shape \(1, 2, 0, 8\); it must be \(1, 2, 30, 8\)"),
        (dict(v=torch.zeros(1, 2, 29, 8)), r"v has shape \(1, 2, 29, 8\); it must be \(1, 2, 30, 8\)"),
        (dict(k=torch.zeros(1, 1, 30, 8)), r"v has shape \(1, 2, 30, 8\); it must be \(1, 1, 30, 8\)"),
        (dict(q=torch.zeros(1, 2, 31, 8)), "q has Nq=31; with causal it must be at most Nk=30"),
        (dict.fromkeys("qkv", torch.zeros(1).expand(1, 1, 2**32, 1)), r"their product must be below 2\^50"),
        (dict.fromkeys("qkv", torch.zeros(1).expand(1, 1, 2**59, 1)), r"their product must be below 2\^50"),
        *[(dict(bc=0), "the tile is 8 x 0; its sides must be at least 1")] * PARTS[kernel].tiled,
    ):
        with pytest.raises(RuntimeError, match=message):
            operator(kernel)(*arguments(kernel, **change))


def test_too_little_memory_is_reported(extension, threads):
    """A row of 2^49 scores for each of 2^12 threads: 2^63 bytes, which a signed 64-bit size cannot hold."""
    threads(2**12)
    k = torch.zeros(1).expand(1, 1, 2**49, 1)
    for part in ("part3", "part4"):
        with pytest.raises(RuntimeError, match="there is not enough memory for 5764607523034"):
            attention(part, k[:, :, :1], k, k, bc=2**49)
    q = torch.zeros(1).expand(1, 1, 2**24, 1)  # the scores take 1 PiB
    with pytest.raises(RuntimeError, match="there is not enough memory for 281474976710656 numbers"):
        attention("part1", q, q, q)


def test_the_gil_is_released(extension, threads):
    """Another thread runs during a call, although Python itself lets none run; a busy machine may be late."""
    threads(1)
    q = torch.randn(1, 2, 1024, 64)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(0)

    def ticks_of_a_call():
        before = len(ticks)
        attention("part1", q, q, q)
        return len(ticks) - before

    ticking = threading.Thread(target=tick)
    ticking.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # seconds
    try:
        assert any(ticks_of_a_call() for _ in range(1000))
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        ticking.join()
