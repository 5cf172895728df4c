"""Engines that run a checkpoint's own weights, behind one interface.

Each engine is one class. Its docstring names the path taken through the engine, and the reason. An engine
whose packages are not installed is left out.
"""

from torch import Tensor

from shakespeare.model.gpt import GPT

Texts = list[list[int]]  # token ids of equally long texts


class Peer:
    """An engine that holds a model's weights; the first call with a batch size may allocate its buffers.

    name: the engine and its version. rounded: whether its weights are, so that its loss is measured too.
    most_error: the largest error of its logits; with a larger one it is wrong and not timed.
    Prompts have at least one token, prompt and count at most block_size + 1: the last token is not read.
    """

    name: str
    rounded = False
    most_error = 1e-3

    def logits(self, ids: list[int]) -> Tensor:
        """Logits (V,) of the token after `ids`."""
        return self.every_logits(ids)[-1]

    def every_logits(self, ids: list[int]) -> Tensor:
        """Logits (T, V) of the token after each of `ids` (T,); only rounded weights need it, for the loss."""
        raise NotImplementedError

    def greedy_batch(self, prompts: Texts, count: int) -> Texts:
        """The `count` likeliest tokens that follow each of several prompts of equal length."""
        raise NotImplementedError

    def prefill(self, ids: list[int]) -> None:
        """Read `ids` at once and find the first token that follows."""
        self.greedy_batch([ids], 1)


def named_weights(model: GPT) -> dict[str, Tensor]:
    """The state dict without nanoGPT's prefix: wte.weight, h.0.attn.c_attn.weight (out, in) and so on."""
    return {
        name.removeprefix("transformer."): tensor.detach().float().contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to wte.weight
    }
