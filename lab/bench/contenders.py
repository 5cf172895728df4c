"""The contenders of a benchmark: this repository's parts and kernels, PyTorch's SDPA, others' attention.

prepare() raises ValueError, in one line, for a case that a contender is known not to take.
"""

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shakespeare.attention_ext import PARTS, attention
from shakespeare.attention_ext import rules as ruling
from shakespeare.attention_ext.checks import first_line
from shakespeare.attention_ext.cuda.kernels import BACKWARD, HALVES, KERNELS
from shakespeare.attention_ext.parts import Dtype, Part, able, check_part, is_file
from shakespeare.attention_ext.webgpu.steps import STEPS
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.correctness import backward_of

Call = Callable[[], Any]  # gives the output, or the gradients of q, k and v
SPLIT = "split"  # the kernel for few queries, which has no number
CUDA_CONTENDERS = {
    **{name if name == SPLIT else f"kernel{name}": kernel for name, kernel in KERNELS.items()},
    **BACKWARD,
}
WEBGPU_CONTENDERS = {f"webgpu{name}": step for name, step in STEPS.items()}
# Backends of PyTorch's SDPA: the title, the kind and the name in warnings.
SDPA = {
    "sdpa-math": ("math", SDPBackend.MATH, "Math"),
    "sdpa-efficient": ("memory-efficient", SDPBackend.EFFICIENT_ATTENTION, "Memory efficient"),
    "sdpa-flash": ("FlashAttention-2", SDPBackend.FLASH_ATTENTION, "Flash attention"),
    "sdpa-cudnn": ("cuDNN", SDPBackend.CUDNN_ATTENTION, "CuDNN attention"),
}
_BOTH = {"window": "window_size", "softcap": "softcap"}
# Versions of FlashAttention: title, module, and its names of the rules that it has.
FLASH_ATTN = {
    "flash-attn": ("FlashAttention-2", "flash_attn", _BOTH | {"alibi_slopes": "alibi_slopes"}),
    "flash-attn-3": ("FlashAttention-3", "flash_attn_interface", _BOTH),
    "flash-attn-4": ("FlashAttention-4", "flash_attn.cute", _BOTH | {"sinks": "learnable_sink"}),
}
DETERMINISTIC = "flash-attn-4-deterministic"  # its gradients' sums have one order
FLASH_ATTN[DETERMINISTIC] = ("FlashAttention-4, deterministic", *FLASH_ATTN["flash-attn-4"][1:])

GRADIENTS = (*able(gradient=True), "sdpa", "flex", *SDPA, *FLASH_ATTN, *BACKWARD)  # those that have them
ONLY_GRADIENTS = (DETERMINISTIC, *BACKWARD)  # those that have nothing else


@dataclass(frozen=True)
class Contender:
    """title: the name in pictures. prepare: returns the call to time for a cell and its q, k and v.

    dtypes: those that it is timed in, by device. package: one that it needs. own_allocator: it does not use
    PyTorch's, so its scratch is unknown.
    """

    title: str
    prepare: Callable[[Cell, Tensor, Tensor, Tensor], Call]
    dtypes: Mapping[str, Sequence[Dtype]]
    package: str | None = None
    own_allocator: bool = False


class Contenders(dict[str, Contender]):
    """Contenders by name; a user's file is one too."""

    def __missing__(self, name: str) -> Contender:
        if not is_file(name):
            raise KeyError(name)
        return part_contender(name, check_part(name))


def part_contender(name: str, part: Part) -> Contender:
    """The contender of a row of PARTS, or of a user's file."""
    dtypes = {device: tuple(map(Dtype.parse, names)) for device, names in part.dtypes.items()}
    own_allocator = part.file is not None and "cpu" in part.dtypes
    return Contender(name, attention_call, dtypes, own_allocator=own_allocator)


def contenders() -> dict[str, Contender]:
    """All contenders by name, the parts first."""
    fp32 = (Dtype.FP32,)
    on_cuda = {"cuda": tuple(Dtype)}
    known = Contenders((name, part_contender(name, part)) for name, part in PARTS.items())
    for name, kernel in CUDA_CONTENDERS.items():
        known[name] = Contender(f"kernel {kernel.name}", attention_call, {"cuda": kernel.dtypes})
    for name, step in WEBGPU_CONTENDERS.items():
        takes = (Dtype.FP16,) if "shader-f16" in step.needs else (*fp32, Dtype.FP16)
        known[name] = Contender(f"step {step.name}", attention_call, {"webgpu": takes}, "wgpu", True)
    known.update(
        sdpa=Contender("PyTorch SDPA", sdpa_call, on_cuda | {"cpu": (*fp32, Dtype.BF16)}),
        flex=Contender("FlexAttention", flex_call, on_cuda | {"cpu": fp32}, own_allocator=True),
        onnx=Contender("ONNX Runtime", onnx_call, {"cpu": fp32}, "onnxruntime", own_allocator=True),
    )
    for name, (title, module, _) in FLASH_ATTN.items():
        known[name] = Contender(title, flash_attn_call, {"cuda": HALVES}, module.partition(".")[0])
    for name, (title, _, _) in SDPA.items():
        known[name] = Contender(f"SDPA, {title}", sdpa_backend_call, on_cuda)
    return known


def prepared(cell: Cell, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None) -> Call:
    """The contender's call to time, with dout that of its gradients."""
    prepare = contenders()[cell.contender].prepare
    arguments, sys.argv = sys.argv, sys.argv[:1]  # flash-attn-4's compiler would parse them at first calls
    try:
        if dout is None:
            return prepare(cell, q, k, v)
        call = backward_of(lambda *leaves: prepare(cell, *leaves)(), (q, k, v), dout)
        call()
        return call
    finally:
        sys.argv = arguments


def attention_call(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """attention() with the cell's part, tile and SIMD helpers, or with one of part4's kernels on a GPU."""
    if cell.device == "webgpu":
        from shakespeare.lab.webgpu.device import prepared

        step = WEBGPU_CONTENDERS.get(cell.contender)
        return prepared(q, k, v, cell.causal, step.name if step else None)
    kernel = CUDA_CONTENDERS.get(cell.contender)
    part, name = ("part4", kernel.name) if kernel else (cell.contender, None)
    chosen: dict[str, Any] = {"br": cell.br, "bc": cell.bc, "simd": cell.simd or "auto", "kernel": name}
    return partial(attention, part, q, k, v, causal=cell.causal, **chosen, **cell.options(q.device))


def sdpa_call(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """PyTorch's scaled_dot_product_attention on contiguous inputs; with rules all of them are a mask."""
    if not cell.rules:
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=cell.causal)
    rules = cell.options(q.device)
    lacking = {"softcap", "sinks"} & rules.keys()
    if lacking:
        raise ValueError(f"scaled_dot_product_attention has no {' and no '.join(sorted(lacking))}")
    scores = torch.zeros(*q.shape[:3], cell.N, device=q.device)
    changed, seen = ruling.checked(rules, q, cell.N).change(scores, cell.causal)
    mask = changed.masked_fill(~seen, -torch.inf).to(q.dtype)
    return partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask)


def flex_call(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """PyTorch's FlexAttention, compiled; its block mask is made beforehand, as its users do."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rules = cell.options(q.device)
    if "sinks" in rules:
        raise ValueError("FlexAttention has no sinks")
    left, right = rules.get("window", (cell.N, cell.N))
    right = 0 if cell.causal else right
    documents = rules.get("documents")
    slopes, bias, cap = (rules.get(name) for name in ("alibi_slopes", "bias", "softcap"))

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        near = (j >= i - left) & (j <= i + right)
        return near if documents is None else near & (documents[0, i] == documents[0, j])

    def score(s: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        s = s if cap is None else cap * torch.tanh(s / cap)
        s = s if slopes is None else s - slopes[h] * (i - j).abs()
        return s if bias is None else s + bias[0, 0, i, j]

    all_seen = left >= cell.N and right >= cell.N and documents is None
    mask = None if all_seen else create_block_mask(seen, None, None, cell.N, cell.N, device=q.device)
    change = score if slopes is not None or bias is not None or cap is not None else None
    torch.compiler.reset()  # each case is compiled for itself
    call = partial(torch.compile(flex_attention, dynamic=False), q, k, v, block_mask=mask, score_mod=change)
    call()
    return call


def flash_attn_call(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """FlashAttention on views (B, N, H, d). Raises ValueError for rules that it lacks."""
    _, module, its_names = FLASH_ATTN[cell.contender]
    rules = cell.options(q.device)
    lacking = rules.keys() - its_names.keys()
    if lacking:
        raise ValueError(f"contender {cell.contender!r} has no {' and no '.join(sorted(lacking))}")
    if "sinks" in rules:
        rules["sinks"] = rules["sinks"].bfloat16()
    views = [t.transpose(1, 2) for t in (q, k, v)]
    options = {its_names[name]: x for name, x in rules.items()}
    if cell.contender == DETERMINISTIC:
        options["deterministic"] = True
    attend: Callable[..., Any]

    def call() -> Tensor:
        out = attend(*views, causal=cell.causal, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    try:
        attend = importlib.import_module(module).flash_attn_func
        with warnings.catch_warnings(action="ignore"):
            call()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"contender {cell.contender!r} needs {module}: {first_line(error)}") from None
    return call


def sdpa_backend_call(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """SDPA by one backend. Raises ValueError, with PyTorch's reason, if it refuses the inputs."""
    _, backend, name = SDPA[cell.contender]
    if cell.rules:
        raise ValueError(f"contender {cell.contender!r} takes no rules")

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(why_refused(name, [str(w.message) for w in caught], error)) from None
    return call


def why_refused(name: str, warned: Sequence[str], error: Exception) -> str:
    """The reason among PyTorch's warnings, in one line: the one that follows its "... not used because:"."""
    lines = [re.sub(r"\s*\(Triggered internally.*", "", line, flags=re.S).strip() for line in warned]
    for heading, reason in zip(lines, lines[1:]):
        if heading.startswith(name) and "because" in heading:
            return " ".join(reason.split())
    return first_line(error)


def onnx_call(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """ONNX Runtime's MultiHeadAttention on inputs (B, N, H d). Raises ValueError if it is not installed."""
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        install = "pip install -c constraints.txt -e '.[bench]'"
        raise ValueError(f"contender 'onnx' needs ONNX Runtime: {install}") from None
    if cell.rules:
        raise ValueError("contender 'onnx' takes no rules")
    B = cell.batch
    H = cell.heads
    d = cell.d
    settings = {"num_heads": H, "scale": d**-0.5, "unidirectional": int(cell.causal)}
    node = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["o"], domain="com.microsoft", **settings)
    lengths = {"q": q.shape[2], "k": cell.N, "v": cell.N, "o": q.shape[2]}
    value = [helper.make_tensor_value_info(t, TensorProto.FLOAT, [B, n, H * d]) for t, n in lengths.items()]
    graph = helper.make_graph([node], "attention", value[:3], value[3:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cell.threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    feed = {n: t.transpose(1, 2).reshape(B, -1, H * d).numpy() for n, t in (("q", q), ("k", k), ("v", v))}

    def call() -> Tensor:
        return torch.from_numpy(session.run(None, feed)[0]).view(B, -1, H, d).transpose(1, 2)

    return call
