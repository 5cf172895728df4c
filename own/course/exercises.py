"""The exercises of the course: the parts' own sources with gaps, and a page for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shakespeare.lab.command import ROOT
from shakespeare.own.trial.cases import Case

CPU, CUDA = "attention_ext/csrc/cpu", "attention_ext/csrc/cuda"
EVEN = (1, 4, 8, 64)  # N of the first two stages, which tiles divide
STAGES = {
    "plain": "right without a mask",
    "causal": "right with a causal mask",
    "awkward": "right at awkward sizes: N = 1, 63, 1025, fewer queries than keys, d = 24, strides, threads",
    "memory": "no access out of bounds, and no race, as far as the sanitizers here find them",
    "fast": "as fast as {share:g} % of {limit}",
}
STAGES_OF_BACKWARD = STAGES | {
    "awkward": "right at awkward sizes: N = 1, 63, 130, fewer queries than keys, d = 24",
    "memory": "no input is changed",
}
STAGES_OF_DECODER = STAGES | {
    "plain": "right for a prompt, without a cache",
    "causal": "right one token at a time, with a cache",
    "awkward": "right for several texts, a prompt of 1 token, and a cache that is full at the end",
    "memory": "no weight and no earlier key or value is changed",
}
PAGE = """\
# {self.name}

{self.goal} Write what `Yours:` names in `{self.file}`.

```sh
{tools}```

Read:

{reading}

Stages, a point for each. The limit of the last one is measured in the same run.

{stages}
"""
FMA, PRODUCTS = "the FMA peak", "its matrix products alone"


@dataclass(frozen=True)
class Gap:
    """Lines of a source that the student writes: from the first line that holds `first` on.

    They end with the block that this line opens, or before the next line that holds `before`; "}" is the end
    of the block around them. nest: the comment that replaces them.
    """

    first: str
    nest: str
    before: str = ""

    def cut(self, lines: list[str], start: int, comment: str) -> int:
        """Replace the gap's lines after line `start`; return the line after the comment."""
        at = next(i for i in range(start, len(lines)) if self.first in lines[i])
        indent = re.match(r"\s*", lines[at])[0]  # type: ignore[index]
        end = f"{indent}}}"
        later = range(at + 1, len(lines))
        if self.before == "}":
            depth = len(indent)
            after = next(i for i in later if lines[i].lstrip().startswith("}") and lines[i].find("}") < depth)
        elif self.before:
            after = next(i for i in later if self.before in lines[i])
        elif lines[at].endswith("{"):
            after = next(i for i in later if lines[i].startswith(end)) + 1
        else:
            after = at + 1
        made = [f"{indent}{comment} {line}".rstrip() for line in ("Yours:", *self.nest.splitlines())]
        lines[at:after] = made
        return at + len(made)


@dataclass(frozen=True)
class Exercise:
    """A row of the course.

    name: of its file, without the suffix of `source`, a path in the project. kind: how it is checked. goal,
    reading: of its page. share: of `limit`, in %, that the last stage asks for. names: names of the source
    that the file has otherwise. head, start: the file begins with `head`, then with the line that begins with
    `start`.
    """

    name: str
    source: str
    goal: str
    reading: tuple[str, ...]
    gaps: tuple[Gap, ...]
    share: float
    limit: str = FMA
    kind: str = "attention"
    names: str = ""
    head: str = ""
    start: str = ""

    @property
    def file(self) -> str:
        """The name of its file."""
        return self.name + Path(self.source).suffix

    @property
    def stages(self) -> dict[str, str]:
        """What each stage asks for, in order."""
        tables = {"backward": STAGES_OF_BACKWARD, "decoder": STAGES_OF_DECODER}
        stages: Mapping[str, str] = tables.get(self.kind, STAGES)
        return {key: text.format(share=self.share, limit=self.limit) for key, text in stages.items()}

    def solution(self) -> str:
        """The part's own source, as the exercise's file."""
        text = (ROOT / self.source).read_text(encoding="utf-8")
        if self.start:
            text = self.head + text[text.index(f"\n{self.start}") + 1 :]
        if self.names:
            text = re.sub(rf"\b{self.names}_(scratch|attention)\b", r"\1", text)
        return text

    def text(self) -> str:
        """The solution with its gaps."""
        lines, at = self.solution().splitlines(), 0
        for gap in self.gaps:
            at = gap.cut(lines, at, "#" if self.source.endswith(".py") else "//")
        return "\n".join(lines) + "\n"

    def page(self) -> str:
        """Its page, as Markdown."""
        stages = "\n".join(f"{i}. {text}" for i, text in enumerate(self.stages.values(), 1))
        reading = "\n".join(f"- {each}" for each in self.reading)
        tools = f"python gpt.py course check {self.file}    # the stages, one by one\n"
        if self.kind == "attention":
            tools += (
                f"python gpt.py try {self.file}             # the first wrong case, its diagnosis, a hint\n"
            )
        return PAGE.format(self=self, tools=tools, reading=reading, stages=stages)


def cases_of(stage: str) -> Callable[[Case], bool]:
    """The cases that a stage of 'attention' asks for."""
    even = {
        "plain": lambda case: case.Nq == case.Nk in EVEN and not case.causal and case.threads == 1,
        "causal": lambda case: case.Nq == case.Nk in EVEN and case.causal,
    }
    return even.get(stage, lambda case: True)


# The shares are at most half of what the parts reach on the processors of docs/results and on the GPU
# of docs/learn/gpu.md, so that other machines allow them. Part 1 adds one number at a time, and a chain of
# additions reaches 1 / (lanes x units x latency) of the peak.
EXERCISES = (
    Exercise(
        "1-naive",
        f"{CPU}/part1_naive.cpp",
        "The textbook's three loops for each head.",
        ("docs/learn/attention.md, part 1", "attention_ext/csrc/attention.h: what a call holds"),
        (
            Gap(
                "for (int64_t j = 0; j < n; j++) {",
                "for j < n:  S[i][j] <- scale * sum over c of Q[i][c] * K[j][c]",
            ),
            Gap("const float log_sum", "S[i] <- softmax(S[i]) over the keys that i sees", "}"),
            Gap(
                "for (int64_t c = 0; c < d; c++) {", "for c:  O[i][c] <- sum over j < n of S[i][j] * V[j][c]"
            ),
        ),
        0.5,
        names="naive",
    ),
    Exercise(
        "2-blocked",
        f"{CPU}/part2_blocked.cpp",
        "Cut both products into tiles that stay in cache, and let all lanes of a vector work.",
        (
            "docs/learn/attention.md, part 2",
            "attention_ext/csrc/simd/helpers.h: transpose, multiply, multiply_add",
        ),
        (
            Gap(
                "for (int64_t j0 = 0; j0 < Nk; j0 += T) {",
                "for key tiles j0, at most DEPTH columns c0 at a time:\n"
                "    Kt <- scale * K[j0..][c0..]^T\n"
                "    for query tiles i0 that see any of its keys:\n"
                "        S[i0..][j0..] <- Q[i0..][c0..] Kt, added up over c0",
            ),
            Gap(
                "for (int64_t i0 = 0; i0 < Nq; i0 += T) {",
                "for query tiles i0:\n"
                "    for key tiles j0 that all of its queries see:  O[i0..] += S[i0..][j0..] V[j0..]\n"
                "    for each query, the keys on the diagonal that it sees",
            ),
        ),
        15,
        names="blocked",
    ),
    Exercise(
        "3-fused",
        f"{CPU}/part3_fused.cpp",
        "Take one row of scores through the softmax and the product before the next: S becomes a row, and "
        "threads share the rows.",
        ("docs/learn/attention.md, part 3", "attention_ext/csrc/threads.h: for_each_item"),
        (
            Gap(
                "const int64_t n = a.seen(i);",
                "S[j] <- scale * Q[i] . K[j]        for the keys that i sees\n"
                "S    <- exp(S - max(S)), l <- sum(S)\n"
                "O[i] <- S V / l",
                "}",
            ),
        ),
        10,
        names="fused",
    ),
    Exercise(
        "4-flash",
        f"{CPU}/part4_flash.cpp",
        "FlashAttention-2: tiles of keys too, and an online softmax, so that no whole row of S is stored.",
        (
            "docs/learn/attention.md, part 4",
            "arXiv:2307.08691, Algorithm 1",
            "attention_ext/csrc/cpu/part4.h: a tile",
        ),
        (
            Gap(
                "tile.load({Q",
                "the tile's Q; then for key tiles j0, at most a.Bc keys, that any of its queries sees:\n"
                "    attend to K[j0..] and V[j0..]\n"
                "then its O and lse",
                "}",
            ),
            Gap(
                "const auto scores =",
                "S^T <- K Q^T for `queries` queries from r0 on\n"
                "m_new <- max(m, rowmax(S)), P <- 2^(S - m_new), l <- 2^(m - m_new) * l + rowsum(P)\n"
                "O^T <- O^T diag(2^(m - m_new)) + V^T P^T, where query r sees the first `first + r` keys",
                "}",
            ),
        ),
        20,
        names="flash",
    ),
    Exercise(
        "5-launches",
        f"{CUDA}/kernel1.cu",
        "On a GPU: a launch for each tile of keys, with m, l and O in global memory in between.",
        ("docs/learn/gpu.md, kernel 1", "attention_ext/csrc/cuda/call.h: what a call holds"),
        (
            Gap(
                "s += Q[row * d + c] * K", "for c:  s <- s + Q[row][c] * K[column][c], both in shared memory"
            ),
            Gap(
                "m_new = fmaxf(m_new",
                "m_new <- max(m, the row's scores S[row][0 ..])\n"
                "l     <- 2^(m - m_new) * l + the sum of 2^(S[row][j] - m_new)\n"
                "for each of the thread's columns c:\n"
                "    o <- 2^(m - m_new) * o + sum over j of the weight * V[j][c]\n"
                "    out <- o / l after the last tile of keys, else state_o <- o",
                "__syncwarp();  // every lane",
            ),
        ),
        1,
    ),
    Exercise(
        "6-one-launch",
        f"{CUDA}/kernel2.cu",
        "One launch: a block goes over the keys itself, and a thread has 4 x 4 scores.",
        ("docs/learn/gpu.md, kernel 2",),
        (
            Gap(
                "for (int c = 0; c < d; ++c) {",
                "for c:  s[i][j] += Q[row i][c] * K[column j][c], each number read once for 4 products",
            ),
            Gap(
                "for (int i = 0; i < EACH; ++i) {",
                "for each row i: mask and scale s[i]; m_new <- the largest of the row's threads\n"
                "    l[i], o[i] <- 2^(m[i] - m_new) times themselves, m[i] <- m_new\n"
                "    P[row][column] <- 2^(s - m_new), and l[i] <- l[i] + it",
            ),
            Gap(
                "for (int j = 0; j < BC; ++j) {",
                "for j, i, c:  o[i][c] <- o[i][c] + P[row i][j] * V[j][column c]",
            ),
        ),
        10,
    ),
    Exercise(
        "7-registers",
        f"{CUDA}/kernel3.cu",
        "Keep the state in registers: a row for each thread, and keys that a whole warp reads at once.",
        ("docs/learn/gpu.md, kernel 3",),
        (
            Gap(
                "for (int j0 = 0; j0 < BC && first_key + j0 < keys; j0 += STRIP) {",
                "for STRIP keys at a time:\n"
                "    s[j] <- q . K[j0 + j], added up over the SHARE threads of the row; masked: -inf\n"
                "    m_new <- max(m, s); l and O(i) <- 2^(m - m_new) times themselves\n"
                "    s[j] <- 2^(s[j] - m_new), l <- l + s[j], O(i) <- O(i) + s[j] * V[j0 + j]",
            ),
        ),
        15,
    ),
    Exercise(
        "8-tensor-cores",
        f"{CUDA}/kernel5_tf32.cu",
        "Let the tensor cores multiply: float32 as three products of tf32.",
        ("docs/learn/gpu.md, kernel 5", "attention_ext/csrc/cuda/mma.h: split, multiply_tf32, load_shared"),
        (
            Gap(
                "UNROLLED(block, WIDTH / 32)",
                "S[i][n] <- Q K^T, for blocks of 32 columns and GROUP tiles of 8 keys:\n"
                "    T <- low high + high low + high high;  S <- S + T",
                "}",
            ),
            Gap(
                "UNROLLED(block, WIDTH / 32) {",
                "for blocks of 32 columns, and each 8 keys:  T <- T + P V by three products;  O <- O + T",
                "}",
            ),
        ),
        30,
    ),
    Exercise(
        "9-backward",
        "attention_ext/reference.py",
        "The backward pass: P is computed again from the logsumexp, tile by tile.",
        ("arXiv:2307.08691, Algorithm 2", "attention_ext/csrc/cpu/part4_backward.cpp: the same in C++"),
        (
            Gap(
                "Sij = scale * (Qi @ Kj.mT)",
                "Sij <- scale Qi Kj^T, masked: -inf; Pij <- exp(Sij - lse_i)          lines 10, 11\n"
                "dVj <- dVj + Pij^T dOi                                               line 12\n"
                "dPij <- dOi Vj^T; dSij <- scale Pij (dPij - Di)                      lines 13, 14\n"
                "dQi <- dQi + dSij Kj; dKj <- dKj + dSij^T Qi                         lines 15, 16",
                "return dq, dk, dv",
            ),
        ),
        10,
        PRODUCTS,
        "backward",
        head='"""Attention\'s backward pass in PyTorch."""\n\nfrom torch import Tensor\nimport torch\n\n'
        "from shakespeare.attention_ext.reference import seen\n\n\n",
        start="def flash_attention_backward",
    ),
    Exercise(
        "10-decoder",
        "model/gpt.py",
        "A step of the decoder: from a token to the logits of the next one, with the keys and values of "
        "earlier tokens in a cache.",
        ("docs/learn/attention.md, in the model", "model/kv_cache.py: attend, positions"),
        (
            Gap(
                "q, k, v = (",
                "q, k, v <- c_attn(x), each as (B, H, T, d)\n"
                "y <- attention, over the cache's keys and values too if there is a cache (cache.attend)\n"
                "y <- (B, T, C) again",
                "return self.resid_dropout",
            ),
            Gap("x = x + self.attn", "x <- x + attention(LN(x))"),
            Gap(
                "positions = caches[0]",
                "the positions, after those in the caches; x <- their embeddings + the tokens'\n"
                "x <- the blocks, each with its layer's cache",
                "if last_only:",
            ),
        ),
        5,
        PRODUCTS,
        "decoder",
    ),
)


def write(folder: Path) -> list[Path]:
    """Write the exercises and their pages into a folder, which may exist; return their files.

    Raises ValueError if one of the files exists.
    """
    texts = {each.file: each.text() for each in EXERCISES}
    texts |= {f"{each.name}.md": each.page() for each in EXERCISES}
    for name in texts:
        if (folder / name).exists():
            raise ValueError(f"DIRECTORY is {str(folder)!r}; {name} exists there, and is not replaced")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / each.file for each in EXERCISES]
