"""Calls every CUDA kernel in every dtype on a few small cases, for compute-sanitizer: python cuda_cases.py"""

from __future__ import annotations

import torch

from attention_ext import attention
from attention_ext.cuda import driver
from attention_ext.cuda.kernels import KERNELS

# (B, H, Nq, Nk, d), causal: full and ragged tiles, one query, widths that are padded
CASES = [((1, 2, 130, 200, 32), True), ((2, 1, 1, 300, 64), False), ((1, 1, 70, 70, 40), True)]


def main() -> None:
    """Run all of them; compute-sanitizer reports what is wrong."""
    capability, count = driver.gpu(0).capability, 0
    for name, kernel in KERNELS.items():
        for dtype in kernel.dtypes:
            if not kernel.runs_on(capability, dtype):
                continue
            for (B, H, Nq, Nk, d), causal in CASES:
                kind = getattr(torch, dtype.torch_name)
                q, k, v = (torch.randn(B, H, n, d).to(kind).cuda() for n in (Nq, Nk, Nk))
                out = attention("part4", q, k, v, causal=causal, kernel=name)
                torch.cuda.synchronize()
                assert out.isfinite().all()
                count += 1
    print(f"{count} calls")


if __name__ == "__main__":
    main()
