"""The backward pass of an attention of your own: the gradients of q, k and v, from that of the output.

q, out, dout: (B, H, Nq, d). k, v: (B, H, Nk, d). lse, the logsumexp of each row of S: (B, H, Nq). float32.
A file that imports torch or triton gets PyTorch's tensors, another one NumPy's arrays. The results are dq, as
q, and dk and dv, as k. No input may be changed.
"""

import torch


def attention_backward(q, k, v, out, lse, dout, causal, scale):
    Nq = q.shape[2]
    Nk = k.shape[2]
    # The weights again, from the logsumexp: P = softmax(S) = exp(S - lse), for all heads at once
    S = scale * (q @ k.mT)  # (B, H, Nq, Nk)
    if causal:  # query i sees the keys j <= i + (Nk - Nq)
        seen = torch.ones(Nq, Nk, dtype=torch.bool, device=q.device).tril(Nk - Nq)
        S = S.masked_fill(~seen, -torch.inf)
    P = torch.exp(S - lse[..., None])
    # out = P V
    dv = P.mT @ dout
    dP = dout @ v.mT  # (B, H, Nq, Nk)
    # The softmax: a row's weights sum to 1, so its mean gradient, weighted, is taken from each
    D = (dout * out).sum(-1, keepdim=True)  # (B, H, Nq, 1), the same as (P * dP).sum(-1)
    dS = scale * P * (dP - D)
    # S = scale * Q K^T
    return dS @ k, dS.mT @ q, dv
