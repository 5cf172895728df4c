"""Checks that the arguments of all ranks agree; each rank describes its own.

A wrong argument ends every rank with the same error, which names the rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attention_ext import parts
from attention_ext.layout import Rows, length


def with_lengths(method: str, mine: dict, n: int) -> dict:
    """This rank's shapes, but with n rows."""
    replaced = {}
    for name in ("k", "v") if method == "split" else ("q", "k", "v"):
        shape = mine[name]
        replaced[name] = (*shape[:2], n, *shape[3:])
    return replaced


def describe(method: str, part: str, causal: bool, scale: float | None, q, k, v) -> dict:
    """A rank's arguments, as the ranks compare them."""
    found: dict = {"method": method, "part": part, "causal": causal, "scale": scale}
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}; it must be a tensor")
        found[name] = tuple(t.shape)
        found[f"{name}.dtype"] = str(t.dtype)
        found[f"{name}.device"] = t.device.type
    return found


def check(described: Sequence[dict]) -> None:
    """Raise ValueError, naming the rank and the argument, if one differs from most ranks'."""
    for rank, each in enumerate(described):
        for name in ("q", "k", "v"):
            if len(each[name]) != 4:
                raise ValueError(f"rank {rank}: {name} has shape {each[name]}; it must be (B, H, N, d)")
        if each["v"] != each["k"]:
            raise ValueError(f"rank {rank}: v has shape {each['v']}; it must be k's, {each['k']}")
        for name in ("k", "v"):
            for what in ("dtype", "device"):
                if each[f"{name}.{what}"] != each[f"q.{what}"]:
                    raise ValueError(
                        f"rank {rank}: {name} has {what} {each[f'{name}.{what}']}; it must be q's, "
                        f"{each[f'q.{what}']}"
                    )
        B, H, _, d = each["q"]
        if each["k"] != (B, H, each["k"][2], d):
            raise ValueError(f"rank {rank}: k has shape {each['k']}; it must be ({B}, {H}, N, {d}), as q's")
        if 0 in (B, H, d):
            raise ValueError(f"rank {rank}: q has shape {each['q']}; only N may be 0")
    method = described[0]["method"]

    def comparable(name: str, value: Any) -> Any:
        same_rows = name == "q" and method == "split"
        shape = name in ("q", "k", "v") and not same_rows
        return (*value[:2], "N", *value[3:]) if shape else value

    for name in described[0]:
        values = [comparable(name, each[name]) for each in described]
        usual = Counter(values).most_common(1)[0][0]
        for rank, value in enumerate(values):
            if value != usual:
                what = f"{name} of shape {described[rank][name]}" if name in "qkv" else f"{name} {value}"
                shown = f"({', '.join(map(str, usual))})" if name in "qkv" else usual
                raise ValueError(f"rank {rank} has {what}; the others have {shown}")
    row, device = parts.check_part(described[0]["part"]), described[0]["q.device"]
    if described[0]["q.dtype"].removeprefix("torch.") not in row.dtypes.get(device, ()):
        raise TypeError(f"q is {described[0]['q.dtype']} on {device}, which {row.name} does not take")


def check_rows(method: str, causal: bool, queries: Rows, keys: Rows, n: list[int], m: list[int]) -> None:
    """Raise ValueError if the ranks' rows do not fit the method, or k has too few rows."""
    if method == "zigzag":
        for name, rows, found in (("q", queries, n), ("k", keys, m)):
            for rank, chunks in enumerate(rows):
                if length(chunks) != found[rank]:
                    raise ValueError(
                        f"rank {rank}: {name} has {found[rank]} rows; zigzag_rows({sum(found)}, {len(rows)}) "
                        f"gives it {length(chunks)}"
                    )
    Nq, Nk = (n[0] if method == "split" else sum(n)), sum(m)
    if not Nk and Nq:
        raise ValueError("k has no rows on any rank; it must have at least one")
    if causal and Nq > Nk:
        raise ValueError(f"q has Nq={Nq} rows; with causal=True it must have at most Nk={Nk}")
