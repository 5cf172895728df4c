"""The gradients of attention in Triton: dq, dk, dv of out = softmax(scale * q k^T) v, given dout.

q, out, dout, dq: (B, H, Nq, d). k, v, dk, dv: (B, H, Nk, d). lse: (B, H, Nq), each row's logsumexp. float32,
on a GPU; without one Triton interprets this file. The inputs may have any strides, and may not be changed.

The loop nest, FlashAttention-2 (arXiv:2307.08691), Algorithm 2:

    D <- rowsum(dout * out)                                line 4
    for each batch and head, tile j of BLOCK_N keys:       a program each
        for tile i of BLOCK_M queries that see any of them:
            Pij <- exp(scale * Qi Kj^T - lse_i)            lines 10, 11
            dVj <- dVj + Pij^T dOi                         line 12
            dSij <- scale * Pij * (dOi Vj^T - Di)          lines 13, 14
            dQi <- dQi + dSij Kj                           line 15, added to by all programs of a head
            dKj <- dKj + dSij^T Qi                         line 16
"""

import torch
import triton
import triton.language as tl

# BLOCK_M, BLOCK_N, warps of a program, stages of its loop. Triton takes the fastest, and `try` shows all.
TILES = [(16, 32, 4, 1), (32, 32, 4, 1), (32, 64, 8, 1), (64, 64, 8, 1)]
CONFIGS = [triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=w, num_stages=s) for m, n, w, s in TILES]


@triton.jit
def load(t, strides, b, h, rows, c, N, d):
    """Rows of a head's matrix (N, d): (rows, columns), with 0 beyond N and d."""
    at = t + b * strides[0] + h * strides[1] + rows[:, None] * strides[2] + c[None, :]
    return tl.load(at, mask=(rows[:, None] < N) & (c[None, :] < d), other=0.0)


@triton.autotune(CONFIGS, key=["CAUSAL", "COLS"], reset_to_zero=["dq"])
@triton.jit
def backward(
    q, k, v, dout, dq, dk, dv, lse, dots, q_s, k_s, v_s, dout_s, H, Nq, Nk, d, scale,
    CAUSAL: tl.constexpr, COLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(Nk, BLOCK_N)
    j0 = tl.program_id(0) % tiles * BLOCK_N
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b = head // H
    h = head % H
    j = j0 + tl.arange(0, BLOCK_N)
    c = tl.arange(0, COLS)
    Kj = load(k, k_s, b, h, j, c, Nk, d)
    Vj = load(v, v_s, b, h, j, c, Nk, d)
    dKj = tl.zeros([BLOCK_N, COLS], tl.float32)
    dVj = tl.zeros([BLOCK_N, COLS], tl.float32)
    first = tl.maximum(0, j0 - (Nk - Nq)) // BLOCK_M * BLOCK_M if CAUSAL else 0
    for i0 in range(first, Nq, BLOCK_M):
        i = i0 + tl.arange(0, BLOCK_M)
        Qi = load(q, q_s, b, h, i, c, Nq, d)
        dOi = load(dout, dout_s, b, h, i, c, Nq, d)
        lse_i = tl.load(lse + head * Nq + i, mask=i < Nq, other=0.0)
        Di = tl.load(dots + head * Nq + i, mask=i < Nq, other=0.0)
        seen = (i[:, None] < Nq) & (j[None, :] < Nk)
        if CAUSAL:  # query i sees the keys j <= i + (Nk - Nq)
            seen &= j[None, :] <= i[:, None] + (Nk - Nq)
        Sij = scale * tl.dot(Qi, tl.trans(Kj), input_precision="ieee")
        Pij = tl.where(seen, tl.exp(Sij - lse_i[:, None]), 0.0)
        dVj += tl.dot(tl.trans(Pij), dOi, input_precision="ieee")
        dPij = tl.dot(dOi, tl.trans(Vj), input_precision="ieee")
        dSij = scale * Pij * (dPij - Di[:, None])
        at = (head * Nq + i[:, None]) * d + c[None, :]
        inside = (i[:, None] < Nq) & (c[None, :] < d)
        tl.atomic_add(dq + at, tl.dot(dSij, Kj, input_precision="ieee"), mask=inside, sem="relaxed")
        dKj += tl.dot(tl.trans(dSij), Qi, input_precision="ieee")
    at = (head * Nk + j[:, None]) * d + c[None, :]
    inside = (j[:, None] < Nk) & (c[None, :] < d)
    tl.store(dk + at, dKj, mask=inside)
    tl.store(dv + at, dVj, mask=inside)


def attention_backward(q, k, v, out, lse, dout, causal, scale):
    q, k, v, dout = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v, dout))
    B, H, Nq, d = q.shape
    Nk = k.shape[2]
    dq, dk, dv = (torch.zeros(t.shape, device=q.device) for t in (q, k, v))
    dots = (dout * out).sum(-1).contiguous()  # D, (B, H, Nq)
    strides = [t.stride()[:3] for t in (q, k, v, dout)]
    sizes = H, Nq, Nk, d, scale, causal, max(16, triton.next_power_of_2(d))  # tl.dot takes at least 16
    backward[lambda tile: (triton.cdiv(Nk, tile["BLOCK_N"]) * B * H,)](
        q, k, v, dout, dq, dk, dv, lse.contiguous(), dots, *strides, *sizes
    )
    return dq, dk, dv
