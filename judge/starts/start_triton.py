"""Attention of your own in Triton: out = softmax(scale * q k^T) v for each batch and head.

q: (B, H, Nq, d). k, v: (B, H, Nk, d). out: (B, H, Nq, d). float32, or with --dtype 16 bits, on a GPU; without
one Triton interprets this file. q, k and v may have any strides, and may not be changed.

The loop nest, FlashAttention-2 (arXiv:2307.08691), Algorithm 1:

    for each batch and head, tile i of BLOCK_M queries:    a program each
        for tile j of BLOCK_N keys that any of them sees:
            Sij <- scale * Qi Kj^T                         line 8
            m_new <- max(m, rowmax(Sij)); Pij <- exp(Sij - m_new)
            l <- exp(m - m_new) * l + rowsum(Pij)          line 9
            Oi <- exp(m - m_new) * Oi + Pij Vj             line 10
        out <- Oi / l                                      line 12

A tile's sides are powers of two: d is padded to COLS columns, and masks leave out what is beyond Nq, Nk, d.
"""

import torch
import triton
import triton.language as tl

# BLOCK_M, BLOCK_N, warps of a program, stages of its loop. Triton takes the fastest, and `try` shows all.
TILES = [(32, 32, 4, 2), (64, 32, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2)]
CONFIGS = [triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=w, num_stages=s) for m, n, w, s in TILES]


@triton.jit
def load(t, strides, b, h, rows, c, N, d):
    """Rows of a head's matrix (N, d): (rows, columns), with 0 beyond N and d."""
    at = t + b * strides[0] + h * strides[1] + rows[:, None] * strides[2] + c[None, :]
    return tl.load(at, mask=(rows[:, None] < N) & (c[None, :] < d), other=0.0)


@triton.autotune(CONFIGS, key=["CAUSAL", "COLS"])
@triton.jit
def forward(
    q, k, v, out, q_s, k_s, v_s, H, Nq, Nk, d, scale,
    CAUSAL: tl.constexpr, COLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(Nq, BLOCK_M)
    i0 = tl.program_id(0) % tiles * BLOCK_M
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b = head // H
    h = head % H
    i = i0 + tl.arange(0, BLOCK_M)
    c = tl.arange(0, COLS)
    Qi = load(q, q_s, b, h, i, c, Nq, d)
    Oi = tl.zeros([BLOCK_M, COLS], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    keys = tl.minimum(Nk, i0 + BLOCK_M + Nk - Nq) if CAUSAL else Nk
    for j0 in range(0, keys, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        Kj = load(k, k_s, b, h, j, c, Nk, d)
        Vj = load(v, v_s, b, h, j, c, Nk, d)
        # 'ieee': float32. Triton's default rounds to TF32, which has 10 bits of a fraction.
        Sij = scale * tl.dot(Qi, tl.trans(Kj), input_precision="ieee")
        seen = j[None, :] < Nk
        if CAUSAL:  # query i sees the keys j <= i + (Nk - Nq)
            seen &= j[None, :] <= i[:, None] + (Nk - Nq)
        Sij = tl.where(seen, Sij, float("-inf"))
        m_new = tl.maximum(m, tl.max(Sij, 1))
        correction = tl.exp(m - m_new)
        Pij = tl.exp(Sij - m_new[:, None])
        l = correction * l + tl.sum(Pij, 1)
        Oi = correction[:, None] * Oi + tl.dot(Pij.to(Vj.dtype), Vj, input_precision="ieee")
        m = m_new
    at = out + (head * Nq + i[:, None]) * d + c[None, :]
    tl.store(at, Oi / l[:, None], mask=(i[:, None] < Nq) & (c[None, :] < d))


def attention(q, k, v, causal, scale):
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    B, H, Nq, d = q.shape
    Nk = k.shape[2]
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    strides = (t.stride()[:3] for t in (q, k, v))
    COLS = max(16, triton.next_power_of_2(d))  # tl.dot takes at least 16
    forward[lambda tile: (triton.cdiv(Nq, tile["BLOCK_M"]) * B * H,)](
        q, k, v, out, *strides, H, Nq, Nk, d, scale, causal, COLS
    )
    return out
