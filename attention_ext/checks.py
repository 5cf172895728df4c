"""What the tensors of a call must be. torch is not imported here."""

from attention_ext.parts import DEVICES, MOST_SCORES, Part, with_gradient


def check_tensors(part: Part, q, k, v, causal: bool, least: int = 1) -> None:
    """Raise TypeError or ValueError, naming the argument, if a tensor is none that the part takes.

    least: rows that a tensor must have.
    """
    import torch

    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}; it must be a tensor")
        device = t.device
        if device.type not in part.dtypes:
            where = " or ".join(DEVICES[device] for device in part.dtypes if device != "webgpu")
            raise ValueError(f"{name} is on {device}; it must be on {where} in {part.name}")
        if device != q.device:
            raise ValueError(f"{name} is on {device}; it must be on q's {q.device}")
        dtypes = part.dtypes[device.type]
        if str(t.dtype).removeprefix("torch.") not in dtypes:
            known = " or ".join(f"torch.{dtype}" for dtype in dtypes)
            raise TypeError(f"{name} is {t.dtype}; it must be {known} in {part.name}")
        if t.dtype != q.dtype:
            raise TypeError(f"{name} is {t.dtype}; it must be q's {q.dtype}")
    check_shapes(q, k, v, causal, least)


def check_shapes(q, k, v, causal: bool, least: int = 1) -> None:
    """Raise ValueError, naming the argument, unless tensors or arrays have the shapes of a call."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if len(t.shape) != 4 or 0 in t.shape and (least or 0 in (*t.shape[:2], t.shape[3])):
            which = "no empty dimension" if least else "no empty dimension but N"
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be (B, H, N, d) with {which}")
    (B, H, Nq, d), Nk = q.shape, k.shape[2]
    if k.shape != (B, H, Nk, d):
        raise ValueError(
            f"k has shape {tuple(k.shape)}; it must be ({B}, {H}, Nk, {d}), as q is {tuple(q.shape)}"
        )
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}; it must be k's, {tuple(k.shape)}")
    if causal and Nq > Nk:
        raise ValueError(f"q has Nq={Nq} rows; with causal=True it must have at most Nk={Nk}")
    check_size(Nq, Nk)


def check_size(Nq: int, Nk: int) -> None:
    """Raise ValueError if a call has too many scores."""
    if Nq * Nk >= MOST_SCORES:
        raise ValueError(f"q has Nq={Nq} and k Nk={Nk} rows; their product must be below 2^50")


def check_gradient(part: Part, q, k, v) -> None:
    """Raise ValueError, naming the tensor, if one requires a gradient that the part does not compute."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not t.requires_grad:
            continue
        if part.gradient is None:
            who = " and ".join(with_gradient())
            raise ValueError(f"{name} requires a gradient; {part.name} computes none, only {who} do")
        if t.is_cuda or str(t.dtype) != "torch.float32":
            where = f"on {DEVICES[t.device.type]}" if t.is_cuda else f"in {t.dtype}"
            raise ValueError(
                f"{name} requires a gradient; {part.name} computes none {where}, only part0 does"
            )
