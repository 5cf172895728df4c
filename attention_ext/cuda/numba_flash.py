"""FlashAttention-2's forward pass in Numba, with the state of the rows in global memory or in registers.

Dao 2023, arXiv:2307.08691, Algorithm 1, whose lines are named. A row's state is its maximum m, its sum l and
its row of O. One source is compiled twice:
  "spilled"    the state is in global memory; each tile of keys reads it and writes it back
  "registers"  the state is in local arrays, which the compiler keeps in registers

Shapes: Q, O (B H, d, Nq), transposed, so that neighbouring threads, which have neighbouring rows, read
    neighbouring numbers; K, V (B H, Nk, d); lse (B H, Nq); float32; d up to 256. Tiles of Br queries and
    Bc keys.
Loop nest: the grid goes over heads and tiles of queries, a block over tiles of keys:
        all threads copy Kj and Vj to shared memory, neighbouring threads neighbouring numbers
        for each key, for each of W columns: q k, a share of the score; the P shares meet in Sij
        for each key, for each of W columns: O += p v
    A thread visits only the keys that its row sees, so a NaN in the others reaches nothing.
Launch: B H ceil(Nq / Br) blocks of Br x P threads, P = ceil(d / 32). Thread (x, y) has row x and the W
    columns from y W on, so that its local arrays fit the registers for d = 256 too.
Shared memory: Kj and Vj, Bc x P W, padded with zeros from d on; Sij, P x Bc x Br. A warp reads the same
    four numbers of Kj or Vj for all of its rows, and neighbours in Sij, so there are no bank conflicts.
Registers: at most 128, so that two blocks are resident. They hold q, o, m and l. "spilled" reads m, l
    and o from global memory before each tile of keys and writes them back after it.
Improves on kernel 2: it is Python. It is not faster: "registers" takes 12.6 ms at d = 32, kernel 2 10.5
    and kernel 3 8.36. Each score passes through shared memory, and Q and O are transposed by copies of their
    own. "spilled" is 6 % slower than "registers".
Bound: probably shared memory, as in kernel 3; `explain` has no count of these kernels.
Command: python gpt.py bench numba-registers,numba-spilled --device cuda --l2 warm -r 5
Measured: NVIDIA H200, fp32, (100, 1, 4096, 32), no mask: "registers" 12.6 ms, 17.1 TFLOP/s; "spilled"
    13.4 ms, 16.0 TFLOP/s.

The kernels run on a GPU and, with NUMBA_ENABLE_CUDASIM=1, in Numba's simulator without one.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import cuda, float32
from numba.cuda.core import config
from torch import Tensor

from attention_ext.checks import check_tensors
from attention_ext.parts import Part, one_of
from attention_ext.tiles import checked_sides

STATES = ("registers", "spilled")
TAKEN = Part("numba", "", "", dtypes={"cpu": ("float32",), "cuda": ("float32",)})
WIDEST = 256  # the largest d
WIDTH = 32  # columns of a thread, at most
THREADS = 256  # of a block
SUMS = 4  # that make up a score: an addition waits for the one before it, and their errors add up
SHARED = 48 << 10  # bytes that a block may have
# Two blocks are resident, and Kj and Vj are read 16 bytes at a time. The simulator knows neither.
OPTIONS = {} if config.ENABLE_CUDASIM else {"max_registers": 128}
ALIGNMENT = None if config.ENABLE_CUDASIM else 16
# with Python's own numbers the arithmetic would be float64
INF, ZERO, LN2 = np.float32(math.inf), np.float32(0), np.float32(math.log(2))

config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # of small grids, which small inputs have


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    state: str = "registers",
    br: int | None = None,
    bc: int | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v, (B, H, Nq, d), and the rows' logsumexp m + log(l), (B, H, Nq).

    q: (B, H, Nq, d). k, v: (B, H, Nk, d), d up to 256. float32, any strides: on a GPU, whose kernel runs on
    PyTorch's current stream, or on the CPU in the simulator.
    causal: query i sees the keys j <= i + (Nk - Nq). scale: 1/sqrt(d) unless given. state: one of STATES.
    br, bc: queries and keys of a tile, each at least 1; tile()'s unless given.
    Raises ValueError, naming the argument, for wrong shapes and values, TypeError for another dtype.
    """
    one_of("state", state, STATES)
    check_tensors(TAKEN, q, k, v, causal)
    br, bc = checked_sides(br, bc)
    B, H, Nq, d = q.shape
    if d > WIDEST:
        raise ValueError(f"d is {d}; it must be at most {WIDEST}")
    br, bc = (default if given is None else given for given, default in zip((br, bc), tile(d)))
    parts = _parts(d)
    scale = d**-0.5 if scale is None else scale
    blocks = B * H * -(-Nq // br)
    held = blocks * br * parts * (_width(d) + 2) if state == "spilled" else 1  # numbers
    Q, K, V = (t.flatten(0, 1) for t in (q.mT, k, v))
    O, lse, spill = q.new_empty(B * H, d, Nq), q.new_empty(B * H, Nq), q.new_empty(held)
    tensors = [t.contiguous() for t in (Q, K, V)] + [O, lse, spill]

    def run(arrays: Sequence[Any], stream: Any = 0) -> None:
        # scores are in units of ln 2, because a GPU has an instruction for 2^x
        numbers = bool(causal), np.float32(scale * math.log2(math.e))
        kernel(d, br, bc, state == "spilled")[blocks, (br, parts), stream](*arrays, *numbers)

    if q.is_cuda:
        with torch.cuda.device(q.device), cuda.gpus[q.device.index]:
            run(tensors, cuda.external_stream(torch.cuda.current_stream().cuda_stream))
    else:
        run([t.numpy() for t in tensors])
    return O.mT.reshape(B, H, Nq, d).contiguous(), lse.view(B, H, Nq)


def tile(d: int) -> tuple[int, int]:
    """Br and Bc: as many rows as give a block THREADS threads, and the keys that then fit shared memory."""
    parts, pitch = _parts(d), _parts(d) * _width(d)
    br = THREADS // parts // 32 * 32
    bc = 32
    while 4 * (2 * bc * pitch + parts * bc * br) > SHARED:
        bc //= 2
    return br, bc


def _parts(d: int) -> int:
    """Threads that share a row."""
    return -(-d // WIDTH)


def _width(d: int) -> int:
    """Columns of a thread: a multiple of four, for loads of 16 bytes."""
    return -(-d // (4 * _parts(d))) * 4


@cache
def kernel(d: int, Br: int, Bc: int, spilled: bool) -> Any:
    """The kernel for these constants. Numba compiles it at its first call."""
    P, W = _parts(d), _width(d)
    T = Br * P

    @cuda.jit(**OPTIONS)
    def flash(Q, K, V, O, lse, spill, causal, scale):
        Nq, Nk = Q.shape[2], K.shape[1]
        tiles = (Nq + Br - 1) // Br
        head = cuda.blockIdx.x // tiles
        i0 = (tiles - 1 - cuda.blockIdx.x % tiles) * Br  # line 3; the last rows, which see most, come first
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        i = min(i0 + x, Nq - 1)
        columns = min(W, d - y * W) if i0 + x < Nq else 0  # that this thread has
        Qi, Oi = Q[head, y * W :, i], O[head, y * W :, i]
        thread = y * Br + x
        offset = Nk - Nq if causal else Nk
        seen = min(Nk, i + 1 + offset)  # keys, by row i
        last = min(Nk, i0 + Br + offset)  # keys that any row of the block sees

        Kj = cuda.shared.array((Bc, P, W), float32, ALIGNMENT)
        Vj = cuda.shared.array((Bc, P, W), float32, ALIGNMENT)
        Sij = cuda.shared.array((P, Bc, Br), float32)
        q = cuda.local.array(W, float32)
        o = cuda.local.array(W, float32)
        s = cuda.local.array(SUMS, float32)
        state = spill[cuda.blockIdx.x * (W + 2) * T + thread :]  # this thread's: each T-th number
        mi, li = -INF, ZERO
        for c in range(W):
            q[c] = scale * Qi[c] if c < columns else ZERO  # line 4
            o[c] = ZERO  # line 5

        for j0 in range(0, last, Bc):  # line 6
            cuda.syncthreads()  # no thread reads the tile before any more
            for e in range(thread, min(Bc, last - j0) * P * W, T):  # line 7
                j, c = e // (P * W), e % (P * W)
                Kj[j, c // W, c % W] = K[head, j0 + j, c] if c < d else ZERO
                Vj[j, c // W, c % W] = V[head, j0 + j, c] if c < d else ZERO
            cuda.syncthreads()

            if spilled and j0 > 0:
                mi, li = state[W * T], state[(W + 1) * T]
                for c in range(W):
                    o[c] = state[c * T]
            keys = min(Bc, seen - j0)
            for j in range(keys):  # line 8
                for c in range(SUMS):
                    s[c] = ZERO
                for c in range(W):
                    s[c % SUMS] += q[c] * Kj[j, y, c]
                Sij[y, j, x] = (s[0] + s[1]) + (s[2] + s[3])
            if P > 1:
                cuda.syncthreads()
                for j in range(y, keys, P):
                    for part in range(1, P):
                        Sij[0, j, x] += Sij[part, j, x]
                cuda.syncthreads()

            m_new = mi  # line 9
            for j in range(keys):
                m_new = max(m_new, Sij[0, j, x])
            m_safe = ZERO if m_new == -INF else m_new  # -inf - -inf would be NaN
            correction = math.exp2(mi - m_safe)
            mi = m_new
            li *= correction
            for c in range(W):
                o[c] *= correction
            for j in range(keys):
                p = math.exp2(Sij[0, j, x] - m_safe)
                li += p
                for c in range(W):  # line 10
                    o[c] += p * Vj[j, y, c]
            if spilled:
                state[W * T], state[(W + 1) * T] = mi, li
                for c in range(W):
                    state[c * T] = o[c]

        for c in range(W):  # line 12; 0 / 0 = NaN if all scores are -inf
            if c < columns:
                Oi[c] = o[c] / li
        if y == 0 and columns > 0:  # line 13
            lse[head, i] = LN2 * (mi + math.log2(li)) if li != ZERO else -INF

    return flash
