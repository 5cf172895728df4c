"""part4 under torch.func: vmap folds its dimension into the batch; gradients are reverse mode's first.

torch is not imported here: the table of parts is needed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

functions: dict[Any, Callable] = {}  # what stands for an operator under a transform


def active(*tensors: Tensor) -> bool:
    """Whether a transform of torch.func is at work. Raises RuntimeError for a forward-mode gradient."""
    import torch

    if torch.compiler.is_compiling():
        return False
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        refuse_forward()
    return torch._C._are_functorch_transforms_active()


def refuse_forward(*_: Any) -> Any:
    """The gradient of forward mode."""
    raise RuntimeError("part4 has no forward-mode gradient; only part0 has")


def register(compute: Any, gradient: Callable, save: Callable = lambda ctx, inputs, output: None) -> None:
    """Let torch.func transform an operator. gradient, save: as those of torch.library.register_autograd."""
    import torch

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return compute(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            save(ctx, inputs, output)
            ctx.set_materialize_grads(True)  # PyTorch's rule for vmap takes no None

        backward = staticmethod(gradient)
        jvp = staticmethod(refuse_forward)  # type: ignore[assignment]

    functions[compute] = Transformed.apply
    names = [argument.name for argument in compute._schema.arguments]

    def rule(info: Any, dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        n = info.batch_size
        named = dict(zip(names, args))
        dims_of = dict(zip(names, dims))
        if dims_of.get("sinks") is not None:  # they have no batch
            rows = [
                compute(*(t if dim is None else t.select(dim, i) for t, dim in zip(args, dims)))
                for i in range(n)
            ]
            return tuple(map(torch.stack, zip(*rows))), tuple(0 for _ in rows[0])
        q = named["q"]
        at = dims_of["q"]
        B = q.shape[0] if at is None else q.movedim(at, 0).shape[1]

        def folded(name: str, t: Any, dim: int | None) -> Any:
            if not isinstance(t, torch.Tensor) or name == "sinks" or not t.numel():
                return t
            if dim is None and name == "bias" and t.shape[0] == 1:
                return t
            t = t.expand(n, *t.shape) if dim is None else t.movedim(dim, 0)
            if name == "bias":
                t = t.expand(n, B, *t.shape[2:])
            t = t.flatten(0, 1)
            return t if name in ("q", "k", "v", "dout") else t.contiguous()  # those may have strides on CUDA

        found = compute(*map(folded, names, args, dims))
        outs = tuple(t.unflatten(0, (n, B)) if t.numel() else t for t in found)
        return outs, tuple(0 if t.numel() else None for t in found)

    torch.library.register_vmap(compute, rule)
