"""What the cheats share: a right kernel, and whether a call is timed."""

import numpy as np


def right(q, k, v, causal, scale):
    S = np.float32(scale) * (q @ k.swapaxes(2, 3))
    if causal:
        S = np.where(np.tri(*S.shape[2:], S.shape[3] - S.shape[2]), S, np.float32(-np.inf))
    P = np.exp(S - S.max(-1, keepdims=True))
    return P.astype(np.float32) @ v / P.sum(-1, keepdims=True)


def timed(q):
    return q.shape[1] == 4 and q.shape[2] >= 256  # no case has this shape
