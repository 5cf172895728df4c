"""The checks of the exercises in PyTorch, in a process of their own: the backward pass and the decoder.

python -m shakespeare.own.course.models backward|decoder FILE

prints a line of JSON for each stage that passed, {"stage": ..., "note": ...}, then why the next one failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shakespeare.attention_ext import reference
from shakespeare.lab.timing import in_turns
from shakespeare.model import load
from shakespeare.model.gpt import GPT
from shakespeare.model.kv_cache import KVCache
from shakespeare.own import kernel as kernels
from shakespeare.own.course.exercises import Failed
from shakespeare.own.trial.cases import beside
from shakespeare.own.trial.gradients import BACKWARD

MODEL = "shakes128"
FLOOR = 5e-7  # of the error, a share of the largest number
ROUNDS, LEAST_SECONDS = 7, 0.02
TIMED = (4, 512, 64)  # heads, N and d of the timed backward pass


def passed(got: Tensor, wanted: Tensor, peer: Tensor, what: str) -> None:
    """Raise Failed unless `got` errs little more than PyTorch's float32, `peer`, beside float64."""
    if tuple(got.shape) != tuple(wanted.shape):
        raise Failed(f"{what} has the shape {tuple(got.shape)}; it must be {tuple(wanted.shape)}")
    mine, exact, other = (t.detach().numpy() for t in (got, wanted, peer))
    expected = beside(exact, other, FLOOR)
    if not expected.allows(mine):
        error = expected.error(mine).max()
        raise Failed(f"{what} is off by {error:.2g}; {expected.allowed:.2g} is allowed")


def unchanged(tensors: dict[str, Tensor], call: Callable[[], object]) -> None:
    """Raise Failed if a call changes one of the tensors."""
    before = {name: t.clone() for name, t in tensors.items()}
    call()
    for name, t in tensors.items():
        if not torch.equal(t, before[name]):
            raise Failed(f"it changes {name}")


def fast(call: Callable[[], object], products: Callable[[], object], share: float) -> str:
    """The share of the speed of the products alone, in a sentence. Raises Failed if it is too small."""
    samples = in_turns([call, products], ROUNDS, LEAST_SECONDS)
    mine, alone = (sorted(sample.seconds)[ROUNDS // 2] for sample in samples)
    text = f"{1e3 * mine:.3g} ms, {100 * alone / mine:.3g} % of its products alone ({1e3 * alone:.3g} ms)"
    if 100 * alone < share * mine:
        raise Failed(text)
    return text


def backward(file: Path, share: float) -> Iterator[tuple[str, str]]:
    """Yield the last stage of a backward pass that is right, with a note. Raises Failed if it is slow."""
    H, N, d = TIMED
    q, k, v, dout = (torch.randn(1, H, N, d) for _ in range(4))
    kernel, s = kernels.loaded(file, backward=True), q @ k.mT
    given: Any = [q, k, v, *reference.flash_attention(q, k, v), dout]
    given = given if kernel.takes_tensors else [t.numpy() for t in given]
    if isinstance(kernel, kernels.Native):
        into = {name: np.empty(q.shape, np.float32) for name in BACKWARD.into}
        call = kernel.prepared(dict(zip(BACKWARD.names, given)), into, False, d**-0.5)
    else:
        call = partial(kernel, *given, False, d**-0.5)

    def products() -> object:
        return q @ k.mT, dout @ v.mT, s.mT @ dout, s @ k, s.mT @ q

    yield "fast", fast(call, products, share)


def decoder(file: Path, share: float) -> Iterator[tuple[str, str]]:
    """Yield each stage that the decoder passes, with a note. Raises Failed at the first other one."""
    module: Any = kernels.imported(file)
    checkpoint = load(MODEL)
    config = checkpoint.config
    mine = module.GPT.of(config, checkpoint.weights)
    peer = GPT.of(config, checkpoint.weights)
    exact = GPT.of(config, checkpoint.weights).double()
    torch.manual_seed(0)

    def caches(texts: int) -> list[KVCache]:
        sizes = (texts, config.n_head, config.block_size, config.head_dim)
        return [KVCache(*sizes) for _ in range(config.n_layer)]

    def compare(ids: Tensor, steps: list[int], what: str) -> None:
        """Read the tokens so many at a time, with a cache; without one if there is one step."""
        held = caches(len(ids)) if len(steps) > 1 else None
        logits = torch.cat([mine(part, held) for part in ids.split(steps, 1)], 1)
        passed(logits, exact(ids), peer(ids), f"the logits of {what}")

    def tokens(texts: int, count: int) -> Tensor:
        return torch.randint(config.vocab_size, (texts, count))

    compare(tokens(1, 20), [20], "20 tokens")
    yield "plain", ""
    compare(tokens(1, 20), [1] * 20, "20 tokens, one at a time")
    yield "causal", ""
    compare(tokens(3, 17), [5, 1, 1, 10], "3 texts, 5, 1, 1 and 10 tokens at a time")
    compare(tokens(1, 1), [1], "a token")
    full = config.block_size
    compare(tokens(1, full), [full - 2, 1, 1], f"{full} tokens, the last two one at a time")
    yield "awkward", ""
    held, token = caches(1), tokens(1, 1)
    mine(tokens(1, 30), held)
    kept = {f"the keys of layer {i}": cache.k[:, :, :30] for i, cache in enumerate(held)}
    kept |= {f"the values of layer {i}": cache.v[:, :, :30] for i, cache in enumerate(held)}
    unchanged(dict(mine.named_parameters()) | kept, lambda: mine(token, held))
    yield "memory", ""
    weights = [t for t in peer.state_dict().values() if t.dim() == 2 and t.shape != (full, config.n_embd)]
    rows = [torch.randn(1, t.shape[1]) for t in weights]

    def step() -> object:
        for cache in held:
            cache.length = 30
        return mine(token, held)

    yield "fast", fast(step, lambda: [row @ t.T for row, t in zip(rows, weights)], share)


def main(kind: str, path: str, share: str) -> None:
    """Print the stages that a file passes, and why it fails the next one."""
    file, check = Path(path), {"backward": backward, "decoder": decoder}[kind]
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(kind == "decoder"):
            for stage, note in check(file, float(share)):
                print(json.dumps({"stage": stage, "note": note}), flush=True)
    except Failed as error:
        print(json.dumps({"failed": str(error)}))
    except Exception as error:
        print(json.dumps({"failed": kernels.reason(error, file)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
