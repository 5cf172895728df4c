"""Attention of your own in Python: out = softmax(scale * q k^T) v for each batch and head.

q: (B, H, Nq, d). k, v: (B, H, Nk, d). float32. A file that imports torch or triton gets PyTorch's tensors,
another one NumPy's arrays; with numba.cuda they are on the GPU, or in Numba's simulator where there is none.
The result is (B, H, Nq, d). q, k and v may not be changed.
"""

import torch


def attention(q, k, v, causal, scale):
    Nq = q.shape[2]
    Nk = k.shape[2]
    # S = scale * Q K^T, for all heads at once
    S = scale * (q @ k.mT)  # (B, H, Nq, Nk)
    if causal:  # query i sees the keys j <= i + (Nk - Nq)
        seen = torch.ones(Nq, Nk, dtype=torch.bool, device=q.device).tril(Nk - Nq)
        S = S.masked_fill(~seen, -torch.inf)
    # P = softmax(S), row by row. Its maximum is subtracted, because exp(89) is beyond a float.
    m = S.amax(-1, keepdim=True)
    P = torch.exp(S - m)
    l = P.sum(-1, keepdim=True)
    return (P @ v) / l
