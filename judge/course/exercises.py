"""The exercises of the course: the parts' own sources with gaps, and a page for each."""

import re
from dataclasses import dataclass
from pathlib import Path

from shakespeare.judge.cases import Case
from shakespeare.lab.subprocesses import ROOT

EVEN = (1, 4, 8, 64)  # N of the first two stages, which tiles divide
STAGES = {
    "plain": "right without a mask",
    "causal": "right with a causal mask",
    "awkward": "right at awkward sizes: N = 1, 63, 1025, fewer queries than keys, d = 24, strides, threads",
    "memory": "no access out of bounds, and no race, as far as the sanitizers here find them",
    "fast": "as fast as {share:g} % of the FMA peak",
}
DECODER_STAGES = {
    "plain": "right for a prompt, without a cache",
    "causal": "right one token at a time, with a cache",
    "awkward": "right for several texts, a prompt of 1 token, and a cache that is full at the end",
    "memory": "no weight and no earlier key or value is changed",
    "fast": "as fast as {share:g} % of its matrix products alone",
}
WINDOW_STAGES = STAGES | {
    "plain": "right without a window",
    "causal": "right with a causal window, at even sizes",
    "awkward": "right at awkward sizes too, where keys that no query sees hold NaN: they are not read",
}
PAGE = """\
# {self.name}

{self.goal} Write what `Yours:` names in `{self.file}`.

```sh
{tools}```

Read:

{self.reading}

Stages, a point for each. The limit of the last one is measured in the same run.

{stages}
"""

# What `try --backward` calls, at the end of reference.py.
CALLED = """

def attention_backward(q, k, v, out, lse, dout, causal, scale):
    return flash_attention_backward(q, k, v, out, lse, dout, causal=causal, scale=scale)
"""

# A block for each exercise: name, source, share and kind; its goal; what to read; its gaps. A gap is a line
# "> first" or "> first ... before", and the comment that replaces it. It begins with the line that holds
# `first`, and ends with the block that this line opens, or before the line that holds `before`, where "}" is
# the end of the block around it.
# The shares are at most half of what the parts reach on the processors of docs/results and on the GPU
# of docs/learn/gpu.md, so that other machines allow them. Part 1 adds one number at a time, and a chain of
# additions reaches 1 / (lanes x units x latency) of the peak.
COURSE = """
# 1-naive attention_ext/csrc/cpu/part1_naive.cpp 0.5 attention
The textbook's three loops for each head.
- docs/learn/attention.md, part 1
- attention_ext/csrc/attention.h: what a call holds
> for (int64_t j = seen.first; j < seen.end; j++) {
for each key j that i sees:  S[i][j] <- scale * sum over c of Q[i][c] * K[j][c]
> const float log_sum ... }
S[i] <- softmax(S[i]) over the keys that i sees
> for (int64_t c = 0; c < d; c++) {
for c:  O[i][c] <- sum of S[i][j] * V[j][c] over the keys j that i sees
# 2-blocked attention_ext/csrc/cpu/part2_blocked.cpp 15 attention
Cut both products into tiles that stay in cache, and let all lanes of a vector work.
- docs/learn/attention.md, part 2, and many sums and vectors
- attention_ext/csrc/simd/helpers.h: transpose, multiply, multiply_add
> for (int64_t j0 = 0; j0 < Nk; j0 += T) {
for key tiles j0, at most DEPTH columns c0 at a time:
    Kt <- scale * K[j0..][c0..]^T
    for query tiles i0 that see any of its keys:
        S[i0..][j0..] <- Q[i0..][c0..] Kt, added up over c0
> for (int64_t i0 = 0; i0 < Nq; i0 += T) {
for query tiles i0:
    for key tiles j0 that all of its queries see:  O[i0..] += S[i0..][j0..] V[j0..]
    for each query, the keys on the diagonal that it sees
# 3-fused attention_ext/csrc/cpu/part3_fused.cpp 10 attention
Take one row of scores through the softmax and the product before the next: S becomes a row, and threads
share the rows.
- docs/learn/attention.md, part 3
- attention_ext/csrc/threads.h: for_each_item
> const Range seen = a.keys(head, i); ... }
S[j] <- scale * Q[i] . K[j]        for the keys that i sees
S    <- exp(S - max(S)), l <- sum(S)
O[i] <- S V / l
# 4-flash attention_ext/csrc/cpu/part4_flash.cpp 20 attention
FlashAttention-2: tiles of keys too, and an online softmax, so that no whole row of S is stored.
- docs/learn/attention.md, part 4
- arXiv:2307.08691, Algorithm 1
- attention_ext/csrc/cpu/part4.h: a tile
> tile.load({Q ... }
the tile's Q; then for key tiles j0, at most a.Bc keys, that any of its queries sees:
    attend to K[j0..] and V[j0..]
then its O and lse
> staircase(keys, ... }
S^T <- K Q^T for `queries` queries from r0 on
m_new <- max(m, rowmax(S)), P <- 2^(S - m_new), l <- 2^(m - m_new) * l + rowsum(P)
O^T <- O^T diag(2^(m - m_new)) + V^T P^T, where query r sees the first `first + r` keys
# 4-window attention_ext/csrc/cpu/part4_flash.cpp 20 window
A window: query i sees the keys from i + Nk - Nq - left on, and no tile before them is read.
- docs/learn/rules.md
- attention_ext/csrc/rules.h: keys, staircase and change
> const Range seen = tile.seen ... tile.store
for key tiles j0, at most a.Bc keys, from the first key that any of the tile's queries sees to the last:
    attend to K[j0..] and V[j0..]
> const Range seen = a.keys(head, i0 + r0 ... continue;
seen <- the keys that any query of the strip sees, which has its steps at seen.first, seen.first + step ...
for the steps j that begin in [j0, j0 + a.Bc):  attend_step(r0, j, keys, first)
query r of the strip sees the first `first + r` of them; if first is keys, a.change hides the others
# 5-launches attention_ext/csrc/cuda/kernel1.cu 1 attention
On a GPU: a launch for each tile of keys, with m, l and O in global memory in between.
- docs/learn/gpu.md, kernel 1
- attention_ext/csrc/cuda/arguments.h: what a call holds
> s += Q[row * d + c] * K
for c:  s <- s + Q[row][c] * K[column][c], both in shared memory
> m_new = fmaxf(m_new ... __syncwarp();  // every lane
m_new <- max(m, the row's scores S[row][0 ..])
l     <- 2^(m - m_new) * l + the sum of 2^(S[row][j] - m_new)
for each of the thread's columns c:
    o <- 2^(m - m_new) * o + sum over j of the weight * V[j][c]
    out <- o / l after the last tile of keys, else state_o <- o
# 6-one-launch attention_ext/csrc/cuda/kernel2.cu 10 attention
One launch: a block goes over the keys itself, and a thread has 4 x 4 scores.
- docs/learn/gpu.md, kernel 2
> for (int c = 0; c < d; ++c) {
for c:  s[i][j] += Q[row i][c] * K[column j][c], each number read once for 4 products
> for (int i = 0; i < EACH; ++i) {
for each row i: mask and scale s[i]; m_new <- the largest of the row's threads
    l[i], o[i] <- 2^(m[i] - m_new) times themselves, m[i] <- m_new
    P[row][column] <- 2^(s - m_new), and l[i] <- l[i] + it
> for (int j = 0; j < BC; ++j) {
for j, i, c:  o[i][c] <- o[i][c] + P[row i][j] * V[j][column c]
# 7-registers attention_ext/csrc/cuda/kernel3.cu 15 attention
Keep the state in registers: a row for each thread, and keys that a whole warp reads at once.
- docs/learn/gpu.md, kernel 3
> for (int j0 = 0; j0 < BC && first_key + j0 < keys; j0 += STRIP) {
for STRIP keys at a time:
    s[j] <- q . K[j0 + j], added up over the SHARE threads of the row; masked: -inf
    m_new <- max(m, s); l and O(i) <- 2^(m - m_new) times themselves
    s[j] <- 2^(s[j] - m_new), l <- l + s[j], O(i) <- O(i) + s[j] * V[j0 + j]
# 8-tensor-cores attention_ext/csrc/cuda/kernel5_tf32.cu 30 attention
Let the tensor cores multiply: float32 as three products of tf32.
- docs/learn/gpu.md, kernel 5
- attention_ext/csrc/cuda/mma.h: split, multiply_tf32, load_shared
> UNROLLED(block, WIDTH / 32) ... }
S[i][n] <- Q K^T, for blocks of 32 columns and GROUP tiles of 8 keys:
    T <- low high + high low + high high;  S <- S + T
> UNROLLED(block, WIDTH / 32) { ... }
for blocks of 32 columns, and each 8 keys:  T <- T + P V by three products;  O <- O + T
# 9-backward attention_ext/reference.py 2 backward
The backward pass: P is computed again from the logsumexp, tile by tile.
- arXiv:2307.08691, Algorithm 2
- attention_ext/csrc/cpu/part4_backward.cpp: the same in C++
> Sij = scale * (Qi @ Kj.mT)  # line 10 ... return dq, dk, dv
Sij <- scale Qi Kj^T, masked: -inf; Pij <- exp(Sij - lse_i)          lines 10, 11
dVj <- dVj + Pij^T dOi                                               line 12
dPij <- dOi Vj^T; dSij <- scale Pij (dPij - Di)                      lines 13, 14
dQi <- dQi + dSij Kj; dKj <- dKj + dSij^T Qi                         lines 15, 16
# 9-backward-cpp judge/starts/start_backward.cpp 2 backward
The backward pass in C++, a query at a time.
- arXiv:2307.08691, section 3.1.2
- attention_ext/csrc/attention.h: what a call holds
- attention_ext/csrc/cpu/part4_backward.cpp: what is next, tiles
> // What the sum ... const int64_t n
D <- sum over c of dO[i][c] * O[i][c]
> // The weight again ... }
P  <- exp(scale * sum over c of Q[i][c] * K[j][c] - lse[i])
dP <- sum over c of dO[i][c] * V[j][c],  dS <- scale * P * (dP - D)
for c:  dV[j][c] += P * dO[i][c],  dQ[i][c] += dS * K[j][c],  dK[j][c] += dS * Q[i][c]
# 10-decoder model/gpt.py 3 decoder
A step of the decoder: from a token to the logits of the next one, with the keys and values of earlier
tokens in a cache.
- docs/learn/attention.md, in the model
- model/kv_cache.py: attend, positions
> q, k, v = ( ... return self.resid_dropout
q, k, v <- c_attn(x), each as (B, H, T, d)
y <- attention, over the cache's keys and values too if there is a cache (cache.attend)
y <- (B, T, C) again
> x = x + self.attn
x <- x + attention(LN(x))
> x = t.wte(ids) ... if last_only:
the positions, after those in the caches; x <- their embeddings + the tokens'
x <- the blocks, each with its layer's cache
# 11-triton judge/starts/start_triton.py 6 attention
In Triton, interpreted without a GPU: a program has a tile of queries, which Triton divides among threads.
- docs/learn/attention.md, part 4
- docs/use/try.md, Triton
- triton-lang.org: tl.load, tl.dot, tl.where
> Sij = scale ... at = out
Sij <- scale * Qi Kj^T in float32, masked: -inf
m_new <- max(m, rowmax(Sij)); Pij <- exp(Sij - m_new)
l <- exp(m - m_new) * l + rowsum(Pij); Oi <- exp(m - m_new) * Oi + Pij Vj; m <- m_new
# 12-triton-backward judge/starts/start_triton_backward.py 6 backward
The backward pass in Triton: a program has a tile of keys, and adds to dQ beside the others.
- arXiv:2307.08691, Algorithm 2
- docs/use/try.md, Triton
- triton-lang.org: tl.atomic_add, reset_to_zero of triton.autotune
> Sij = scale ... at = (head * Nk
Pij <- exp(scale * Qi Kj^T - lse_i), masked: 0                       lines 10, 11
dVj <- dVj + Pij^T dOi                                               line 12
dSij <- scale * Pij * (dOi Vj^T - Di)                                lines 13, 14
dQi <- dQi + dSij Kj, atomically; dKj <- dKj + dSij^T Qi             lines 15, 16
"""


def cut(text: str, gap: str, comment: str) -> tuple[str, str]:
    """A text to the end of a gap, which is replaced by its comment, and what is after that."""
    head, *nest = gap.splitlines()
    first, _, before = head.partition(" ... ")
    if before:
        end = r"(?=^(?!\1) *\})" if before == "}" else rf"(?=^.*{re.escape(before)})"
        body = rf"(?s:.*?){end}"
    else:
        body = r"(?s:.*?)^\1\}.*\n" if head.endswith("{") else ""
    found = re.search(rf"^( *).*{re.escape(first)}.*\n{body}", text, re.M)
    assert found, gap
    comments = [f"{found[1]}{comment} {line}".rstrip() + "\n" for line in ("Yours:", *nest)]
    return text[: found.start()] + "".join(comments), text[found.end() :]


class Failed(Exception):
    """A stage is not passed, with the reason."""


@dataclass(frozen=True)
class Exercise:
    """A row of the course, as COURSE has it. share: % of the limit that the last stage asks for."""

    name: str
    source: str
    goal: str
    reading: str
    gaps: list[str]
    share: float
    task: str

    @property
    def file(self) -> str:
        """The name of its file."""
        return self.name.removesuffix("-cpp") + Path(self.source).suffix

    @property
    def stages(self) -> dict[str, str]:
        """What each stage asks for, in order."""
        texts = {"decoder": DECODER_STAGES, "window": WINDOW_STAGES}.get(self.task, STAGES)
        return {key: text.format(share=self.share) for key, text in texts.items()}

    def solution(self) -> str:
        """The part's own source, as the exercise's file."""
        text = (ROOT / self.source).read_text(encoding="utf-8")
        if self.source.endswith(".cpp"):  # naive_attention, flash_scratch ...
            text = re.sub(r"\b(?!backward)[a-z]+_(scratch|attention)\b", r"\1", text)
        return text + CALLED if self.file == "9-backward.py" else text

    def text(self) -> str:
        """The solution with its gaps."""
        done = ""
        rest = self.solution()
        for gap in self.gaps:
            part, rest = cut(rest, gap, "#" if self.source.endswith(".py") else "//")
            done += part
        return done + rest

    def page(self) -> str:
        """Its page, as Markdown."""
        stages = "\n".join(f"{i}. {text}" for i, text in enumerate(self.stages.values(), 1))
        tools = f"python gpt.py course check {self.file}    # the stages, one by one\n"
        if self.task != "decoder":
            words = f"{self.file} --backward" if self.task == "backward" else self.file
            tools += f"python gpt.py try {words}    # the first wrong case, its diagnosis, a hint\n"
        return PAGE.format(self=self, tools=tools, stages=stages)


def includes(stage: str, case: Case, windowed: bool) -> bool:
    """Whether a stage of 'attention' or 'backward', or of 'window', asks for a case."""
    if stage == "plain" and windowed:
        return case.window is None
    even = case.Nq == case.Nk in EVEN and case.threads == 1
    return {"plain": even and not case.causal, "causal": even and case.causal}.get(stage, True)


def parsed(text: str) -> Exercise:
    """The exercise of a block of COURSE."""
    front, *gaps = text.split("\n> ")
    head, _, rest = front.partition("\n")
    goal, _, reading = rest.partition("\n- ")
    name, source, share, task = head.split()
    return Exercise(name, source, goal.replace("\n", " "), f"- {reading}", gaps, float(share), task)


EXERCISES = tuple(map(parsed, COURSE.split("\n# ")[1:]))


def write(folder: Path) -> list[Path]:
    """Write the exercises and their pages into a folder; their files. Raises ValueError if one exists."""
    texts = {row.file: row.text() for row in EXERCISES} | {f"{row.name}.md": row.page() for row in EXERCISES}
    for name in texts:
        if (folder / name).exists():
            raise ValueError(f"DIRECTORY is {str(folder)!r}; {name} exists there, and is not replaced")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / row.file for row in EXERCISES]
