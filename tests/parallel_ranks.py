"""What the ranks of tests/attention_ext/test_parallel.py run: many cases in one start of the processes."""

from datetime import timedelta

import torch
import torch.distributed as dist

from shakespeare.attention_ext import layout as rows_of
from shakespeare.attention_ext import parallel

RANKS = 4


def tensors(case: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The whole q, k and v of a case; the same in every process."""
    generator = torch.Generator().manual_seed(case["seed"])
    B, H, d = case["B"], case["H"], case["d"]
    dtype = getattr(torch, case["dtype"])
    return tuple(
        torch.randn(B, H, sum(case[n]), d, generator=generator).to(dtype) for n in ("queries", "keys", "keys")
    )  # type: ignore[return-value]


def layout(case: dict) -> tuple[rows_of.Rows, rows_of.Rows]:
    P = len(case["keys"])
    if case["method"] == "zigzag":
        return rows_of.zigzag_rows(sum(case["queries"]), P), rows_of.zigzag_rows(sum(case["keys"]), P)
    keys = rows_of.contiguous(case["keys"])
    if case["method"] == "split":
        return tuple((range(sum(case["queries"])),) for _ in keys), keys
    return rows_of.contiguous(case["queries"]), keys


def run(rank: int, folder: str, cases: list[dict]) -> None:
    """Run the cases as one of RANKS ranks; a case of P ranks runs in a group of the first P."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=1200))
    groups = [dist.new_group(list(range(P))) for P in range(1, RANKS + 1)]
    done = []
    for case in cases:
        P = len(case["keys"])
        if rank >= P:
            done.append(None)
            continue
        q, k, v = tensors(case)
        queries, keys = layout(case)
        mine = [rows_of.take(q, queries[rank]), *(rows_of.take(t, keys[rank]) for t in (k, v))]
        if rank == case["wrong_rank"]:
            mine = [t.bfloat16() if case["wrong"] == "dtype" else t[..., :-1] for t in mine]
        traffic = parallel.Traffic()
        options = {name: case[name] for name in ("part", "causal", "scale")}
        options["lengths"] = [rows_of.length(rows) for rows in keys] if case["known"] else None
        try:
            options |= dict(group=groups[P - 1], traffic=traffic)
            with torch.inference_mode(case["inference"]):
                out = parallel.attention(case["method"], *mine, **options)
            done.append((out.clone(), traffic.sent, traffic.exchanges, traffic.waited))
        except (ValueError, TypeError) as error:
            done.append(f"{type(error).__name__}: {error}")
    torch.save(done, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
