"""PyTorch's decoding loop on a GPU as a CUDA graph.

The cache has the whole block size and a mask, because a graph's sizes are fixed. All texts of a batch are
equally long, PyTorch's best case. On an H200 fp32 was faster by two products and a softmax, bf16 by SDPA.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers import Texts
from benchmarks.peers.pytorch import CachedPyTorch
from shakespeare.model.gpt import GPT


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of one query a head, (B, H, 1, d), over the keys that are `seen`, by the faster way."""
    if q.dtype is not torch.float32:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


class GraphPyTorch(CachedPyTorch):
    """The loop as a CUDA graph: one of a step for each batch size, one for each length of a prompt alone."""

    name = f"PyTorch {torch.__version__}, CUDA graph"

    def __init__(self, model: GPT, threads: int, device: str, dtype: torch.dtype) -> None:
        super().__init__(model, threads, device, dtype)
        self.steps: dict[int, Callable[[], object]] = {}
        self.prompts: dict[int, tuple[Tensor, Tensor, Callable[[], object]]] = {}
        self.tokens: dict[int, Tensor] = {}  # (T_max + 1, B), of each batch size
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # of the token to be read

    def step(self, B: int) -> None:
        """Read the token at `position` of each text, and store the likeliest next one."""
        at = self.position
        tokens = self.tokens[B]
        x = F.embedding(tokens.index_select(0, at)[0], self.wte) + self.wpe.index_select(0, at)  # (B, C)
        seen = (torch.arange(self.config.block_size, device=self.device) <= at)[None, None, None]

        def over_cache(qkv: Tensor, cache: Tensor) -> Tensor:
            cache.index_copy_(3, at, qkv[1:])
            return attend(qkv[0], cache[0], cache[1], seen)

        tokens.index_copy_(0, at + 1, self.last_logits(x[:, None], over_cache).argmax(-1)[None])
        self.position += 1

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """The function as a graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.position.zero_()
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    @torch.inference_mode()
    def greedy_batch(self, prompts: Texts, count: int) -> Texts:
        B = len(prompts)
        T = len(prompts[0])
        if count == 1:
            return self.first_tokens(prompts)
        if B not in self.steps:
            self.tokens[B] = torch.zeros(self.config.block_size + 1, B, dtype=torch.int64, device=self.device)
            self.steps[B] = self.captured(partial(self.step, B))
        self.tokens[B][T] = self.forward(torch.tensor(prompts, device=self.device), 0).argmax(-1)
        self.position.fill_(T)
        for _ in range(count - 1):
            self.steps[B]()
        return self.tokens[B][T : T + count].T.tolist()

    def first_tokens(self, prompts: Texts) -> Texts:
        """The likeliest token after a prompt each."""
        new_ids = torch.tensor(prompts, device=self.device)
        if new_ids.numel() not in self.prompts:
            ids = new_ids.clone()
            out = torch.zeros(len(prompts), 1, dtype=torch.int64, device=self.device)

            def read() -> None:
                out.copy_(self.forward(ids, 0).argmax(-1, keepdim=True))

            self.prompts[new_ids.numel()] = ids, out, self.captured(read)
        ids, out, run = self.prompts[new_ids.numel()]
        ids.copy_(new_ids)
        run()
        return out.tolist()
