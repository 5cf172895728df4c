"""Checks that the arguments of all ranks agree; each rank describes its own.

A wrong argument ends every rank with the same error, which names the rank.
"""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from attention_ext import parts
from attention_ext.layout import Rows, contiguous, length, zigzag_rows


def describe(
    method: str, part: str, causal: bool, scale: float | None, q: Tensor, k: Tensor, v: Tensor
) -> dict:
    """A rank's arguments, as the ranks compare them."""
    found: dict = {"method": method, "part": part, "causal": causal, "scale": scale}
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}; it must be a tensor")
        found |= {name: tuple(t.shape), f"{name}.dtype": str(t.dtype), f"{name}.device": t.device.type}
    return found


def with_rows(mine: dict, n: int) -> dict:
    """This rank's arguments with n rows, as another rank would describe its own."""
    return mine | {name: (*mine[name][:2], n, *mine[name][3:]) for name in _divided(mine["method"])}


def _divided(method: str) -> tuple[str, ...]:
    """The tensors whose rows are spread over the ranks."""
    return ("k", "v") if method == "split" else ("q", "k", "v")


def rows(described: Sequence[dict]) -> tuple[Rows, Rows, int]:
    """The rows of q and of k of each rank, and the offset Nk - Nq.

    Raises ValueError or TypeError, naming the rank and the argument, if one is wrong or differs from most
    ranks', if the rows do not fit the method, or if k has too few.
    """
    for rank, each in enumerate(described):
        _check(rank, each)
    method, P = described[0]["method"], len(described)
    for name in described[0]:
        in_common = [with_rows(each, "N")[name] for each in described]  # type: ignore[arg-type]
        usual = Counter(in_common).most_common(1)[0][0]
        for rank, value in enumerate(in_common):
            if value != usual:
                what = f"{name} of shape {described[rank][name]}" if name in "qkv" else f"{name} {value}"
                shown = f"({', '.join(map(str, usual))})" if name in "qkv" else usual
                raise ValueError(f"rank {rank} has {what}; the others have {shown}")
    row, device, dtype = (described[0][name] for name in ("part", "q.device", "q.dtype"))
    if dtype.removeprefix("torch.") not in parts.check_part(row).dtypes.get(device, ()):
        raise TypeError(f"q is {dtype} on {device}, which {row} does not take")

    n, m = ([each[name][2] for each in described] for name in "qk")
    Nq, Nk = (n[0] if method == "split" else sum(n)), sum(m)
    queries, keys = (
        zigzag_rows(N, P) if method == "zigzag" else contiguous(x) for N, x in ((Nq, n), (Nk, m))
    )
    if method == "split":
        queries = ((range(Nq),),) * P
    for name, layout, found in (("q", queries, n), ("k", keys, m)):
        for rank, chunks in enumerate(layout):
            if length(chunks) != found[rank]:
                raise ValueError(
                    f"rank {rank}: {name} has {found[rank]} rows; zigzag_rows({sum(found)}, {P}) "
                    f"gives it {length(chunks)}"
                )
    if not Nk and Nq:
        raise ValueError("k has no rows on any rank; it must have at least one")
    if described[0]["causal"] and Nq > Nk:
        raise ValueError(f"q has Nq={Nq} rows; with causal=True it must have at most Nk={Nk}")
    return queries, keys, Nk - Nq


def _check(rank: int, each: dict) -> None:
    """Raise ValueError if a rank's tensors do not fit each other."""
    for name in "qkv":
        if len(each[name]) != 4:
            raise ValueError(f"rank {rank}: {name} has shape {each[name]}; it must be (B, H, N, d)")
        for what in ("dtype", "device"):
            found, right = each[f"{name}.{what}"], each[f"q.{what}"]
            if found != right:
                raise ValueError(f"rank {rank}: {name} has {what} {found}; it must be q's, {right}")
    if each["v"] != each["k"]:
        raise ValueError(f"rank {rank}: v has shape {each['v']}; it must be k's, {each['k']}")
    B, H, _, d = each["q"]
    if each["k"] != (B, H, each["k"][2], d):
        raise ValueError(f"rank {rank}: k has shape {each['k']}; it must be ({B}, {H}, N, {d}), as q's")
    if 0 in (B, H, d):
        raise ValueError(f"rank {rank}: q has shape {each['q']}; only N may be 0")
