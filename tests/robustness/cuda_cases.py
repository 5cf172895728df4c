"""Calls CUDA kernels on small cases, for compute-sanitizer: python cuda_cases.py KIND

attention: every kernel in every dtype, and gradients. The other kinds are kernels that decode: `grid` many
texts, `cluster` few, `drafts` few with guesses; `graph` is the attention of the torch engine.
"""

import sys

import torch

from shakespeare.attention_ext import attention
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import BACKWARD, KERNELS
from shakespeare.attention_ext.cuda.tiles import LARGE
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling
from shakespeare.generation.texts import complete
from shakespeare.generation.writer import Writer
from shakespeare.model import load

# (B, H, Nq, Nk, d), causal: full and ragged tiles, one query, widths that are padded
CASES = [((1, 2, 130, 200, 32), True), ((2, 1, 1, 300, 64), False), ((1, 1, 70, 70, 40), True)]
SHARED = ((1, 64, 16, 400, 192), True)  # two warps of split share some strips of keys, one after the other
TEXTS = {"grid": (100,), "cluster": (1, 3, 20), "drafts": (1, 3), "graph": (1, 3)}  # at a time


def call_attention() -> int:
    """Call every kernel; the number of calls."""
    from shakespeare.attention_ext.cuda import operators  # which are compiled

    capability, count = driver.gpu(0).capability, 0
    for name, kernel in (KERNELS | BACKWARD).items():
        for dtype in kernel.dtypes:
            if not kernel.runs_on(capability, dtype):
                continue
            for (B, H, Nq, Nk, d), causal in CASES + [SHARED] * (name == "split" or name in BACKWARD):
                if not any(kernel.tiles(kernel.padded(d), dtype, LARGE, capability)):
                    continue
                kind = getattr(torch, dtype.torch_name)
                q, k, v = (torch.randn(B, H, n, d).to(kind).cuda() for n in (Nq, Nk, Nk))
                forward = None if name in BACKWARD else name
                out, lse = attention("part4", q, k, v, causal=causal, kernel=forward, return_lse=True)
                call = q, None, q, k, v, out, lse, causal, None, name, False, *operators.NO_RULES
                outs = operators.flash_backward(*call) if name in BACKWARD else (out,)
                torch.cuda.synchronize()
                assert all(t.isfinite().all() for t in outs)
                count += 1
    return count


def write(kind: str) -> int:
    """Write texts with settings in turns; the number of tokens."""
    checkpoint, name = load("shakes128"), "torch" if kind == "graph" else "cuda"
    draft = "auto" if kind == "drafts" else "off"
    settings = Sampling(), Sampling(top_p=0.9, top_k=20), Sampling(0, presence_penalty=0.5)
    count = 0
    for texts in TEXTS[kind]:
        for precision in ("fp32",) if kind == "graph" else ("fp32", "bf16"):
            rounded = dict(weights=precision, kv_cache=precision)
            engine = open_engine(checkpoint, name, device="cuda", slots=texts, draft=draft, **rounded)
            for chosen in settings[: 2 if kind == "drafts" else 3]:  # penalties have no drafts
                requests = (
                    Request([i % 65 for i in range(1 + n % 4)], seed=n, sampling=chosen, max_new_tokens=4)
                    for n in range(2 * texts)
                )
                for completion, piece in complete(Writer(engine), checkpoint.tokenizer, requests):
                    count += 0 if piece else completion.new_tokens
            assert (name == "cuda" and len(engine._drafted) > 0) == (kind == "drafts")
    return count


if __name__ == "__main__":
    (kind,) = sys.argv[1:]
    print(f"{call_attention() if kind == 'attention' else write(kind)} results")
