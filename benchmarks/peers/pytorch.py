"""Engines on PyTorch: its model without and with a key-value cache, and transformers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers import Peer, Texts, named_weights
from shakespeare.model.gpt import GPT, causal_attention


class UncachedPyTorch(Peer):
    """nanoGPT's generate(): the whole window through the module for each token, here with SDPA.

    This is what nanoGPT's users run. It keeps no cache, and applies the head to the last position only.
    """

    name = f"PyTorch {torch.__version__}, no cache"

    def __init__(self, model: GPT, threads: int) -> None:
        torch.set_num_threads(threads)
        self.gpt = model.with_attention(causal_attention)

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        return self.gpt(torch.tensor([ids]), last_only=True)[0, -1]

    @torch.inference_mode()
    def greedy_batch(self, prompts: Texts, count: int) -> Texts:
        ids = torch.tensor(prompts)  # (B, T)
        for _ in range(count):
            token = self.gpt(ids, last_only=True).argmax(-1)  # (B, 1)
            ids = torch.cat([ids, token], dim=1)
        return ids[:, -count:].tolist()


class CachedPyTorch(Peer):
    """A plain decoding loop: functions on bare tensors, SDPA over a slice of a preallocated cache.

    At batch 1 calls of modules would cost more than the arithmetic. The cache is sliced, not masked, so that
    a step reads only the keys that exist.
    """

    name = f"PyTorch {torch.__version__}, cached"

    def __init__(
        self, model: GPT, threads: int, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        torch.set_num_threads(threads)
        self.config = model.config
        self.device = device
        self.dtype = dtype
        weights = {name: tensor.to(device, dtype) for name, tensor in named_weights(model).items()}
        self.wte = weights["wte.weight"]
        self.wpe = weights["wpe.weight"]
        self.layers = [
            tuple(
                (weights[f"h.{layer}.{name}.weight"], weights.get(f"h.{layer}.{name}.bias"))
                for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
            )
            for layer in range(model.config.n_layer)
        ]
        self.ln_f = weights["ln_f.weight"], weights.get("ln_f.bias")
        self.caches: dict[int, list[Tensor]] = {}

    def forward(self, ids: Tensor, start: int) -> Tensor:
        """Logits (B, V) after `ids` (B, T), which continue the `start` tokens in the cache."""
        B, T = ids.shape
        stop = start + T

        def attend(qkv: Tensor, cache: Tensor) -> Tensor:
            cache[:, :, :, start:stop] = qkv[1:]
            k, v = cache[:, :, :, :stop].unbind()
            return F.scaled_dot_product_attention(qkv[0], k, v, is_causal=T > 1)

        return self.last_logits(F.embedding(ids, self.wte) + self.wpe[start:stop], attend)

    def last_logits(self, x: Tensor, attend: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Logits (B, V) of the last tokens from embeddings (B, T, C).

        attend: from q, k and v (3, B, H, T, d) and a layer's cache to the heads (B, H, T, d).
        """
        c = self.config
        B, T, C = x.shape
        x = x.view(B * T, C)
        for (ln_1, c_attn, c_proj, ln_2, c_fc, down), cache in zip(self.layers, self.cache(B)):
            qkv = F.linear(F.layer_norm(x, (C,), *ln_1), *c_attn)  # (B T, 3 C)
            y = attend(qkv.view(B, T, 3, c.n_head, c.head_dim).permute(2, 0, 3, 1, 4), cache)
            x = x + F.linear(y.transpose(1, 2).reshape(B * T, C), *c_proj)
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (C,), *ln_2), *c_fc)), *down)
        return F.linear(F.layer_norm(x.view(B, T, C)[:, -1], (C,), *self.ln_f), self.wte)

    def cache(self, B: int) -> list[Tensor]:
        """Keys and values (2, B, H, block_size, d) of each layer, for every text of this batch size."""
        if B not in self.caches:
            c = self.config
            sizes = (2, B, c.n_head, c.block_size, c.head_dim)
            self.caches[B] = [torch.zeros(sizes, device=self.device, dtype=self.dtype) for _ in self.layers]
        return self.caches[B]

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        return self.forward(torch.tensor([ids], device=self.device), 0)[0].float().cpu()

    @torch.inference_mode()
    def greedy_batch(self, prompts: Texts, count: int) -> Texts:
        ids = torch.tensor(prompts, device=self.device)  # (B, T)
        start = 0
        tokens = []
        for _ in range(count):
            tokens.append(self.forward(ids, start).argmax(-1, keepdim=True))  # (B, 1)
            start += ids.shape[1]
            ids = tokens[-1]
        return torch.cat(tokens, dim=1).tolist()


class Transformers(Peer):
    """transformers' GPT2LMHeadModel and its generate(), with their defaults: a growing cache, and SDPA.

    This is the library's one path for this architecture; its static cache was slower here. Its linear layers
    are (in, out) and have biases, which are zero here; its "gelu" is exact.
    """

    def __init__(
        self, model: GPT, threads: int, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        import transformers

        self.name = f"transformers {transformers.__version__}"
        torch.set_num_threads(threads)
        self.gpt = gpt2(model).to(device, dtype)
        self.device = device

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        return self.gpt(torch.tensor([ids], device=self.device), logits_to_keep=1).logits[0, -1].float().cpu()

    @torch.inference_mode()
    def greedy_batch(self, prompts: Texts, count: int) -> Texts:
        ids = torch.tensor(prompts, device=self.device)
        mask = torch.ones_like(ids)
        out = self.gpt.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
        return out[:, -count:].tolist()


def gpt2(model: GPT) -> Any:
    """The weights as transformers' GPT2LMHeadModel; biases that they lack are 0."""
    import transformers

    settings: dict[str, Any] = {
        "n_positions": model.config.block_size,
        "activation_function": "gelu",
        **{name: getattr(model.config, name) for name in ("vocab_size", "n_embd", "n_layer", "n_head")},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings)).eval()
    state = {
        f"transformer.{name}": w.T if ".c_" in name and w.dim() == 2 else w
        for name, w in named_weights(model).items()
    }
    gpt.load_state_dict(state, strict=False)  # other biases are 0 from the start, and the head is tied
    return gpt
