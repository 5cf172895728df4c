"""What can be timed: this repository's parts, PyTorch's SDPA, and ONNX Runtime's attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_ext import PARTS, attention
from lab.bench.cases import Cell

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Contender:
    """title: its name in pictures. prepare: gives the call to time, from a cell and its q, k and v.

    own_allocator: it allocates past PyTorch's allocator, so its scratch is unknown.
    """

    title: str
    prepare: Callable[[Cell, Tensor, Tensor, Tensor], Call]
    own_allocator: bool = False


def contenders() -> dict[str, Contender]:
    """All that can be timed, by name: the parts first."""
    return {name: Contender(name, part_call) for name in PARTS} | {
        "sdpa": Contender("PyTorch SDPA", sdpa_call),
        "onnx": Contender("ONNX Runtime", onnx_call, own_allocator=True),
    }


def part_call(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """attention() with the cell's part, tile and SIMD helpers."""
    simd = cell.simd or "auto"
    return partial(attention, cell.contender, q, k, v, causal=cell.causal, br=cell.br, bc=cell.bc, simd=simd)


def sdpa_call(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """PyTorch's scaled_dot_product_attention on contiguous inputs."""
    return partial(F.scaled_dot_product_attention, q, k, v, is_causal=cell.causal)


def onnx_call(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """ONNX Runtime's MultiHeadAttention on inputs (B, N, H d), its preferred layout.

    Raises ValueError where ONNX Runtime is not installed.
    """
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        raise ValueError(
            "contender 'onnx' needs ONNX Runtime: pip install -c constraints.txt -e '.[bench]'"
        ) from None
    B, H, d = cell.batch, cell.heads, cell.d
    node = helper.make_node(
        "MultiHeadAttention",
        ["q", "k", "v"],
        ["o"],
        domain="com.microsoft",
        num_heads=H,
        scale=d**-0.5,
        unidirectional=int(cell.causal),
    )
    value = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [B, t.shape[2], H * d])
        for n, t in (("q", q), ("k", k), ("v", v), ("o", q))
    ]
    graph = helper.make_graph([node], "attention", value[:3], value[3:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cell.threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    feed = {n: t.transpose(1, 2).reshape(B, -1, H * d).numpy() for n, t in (("q", q), ("k", k), ("v", v))}

    def call() -> Tensor:
        out = torch.from_numpy(session.run(None, feed)[0])
        return out.view(B, -1, H, d).transpose(1, 2)

    return call
