"""generation.py --device cuda: our engines against PyTorch on one GPU, and the share of what it allows.

PyTorch's contenders are a decoding loop on bare tensors: eager, with a cache that is sliced; as a CUDA graph,
compiled, and both, with a cache of the whole block size and a mask, because a graph's sizes are fixed. In
fp32 their attention is two products and a softmax: for 1,024 texts on an H200 the graph was then 2.9 times as
fast as with PyTorch's SDPA and a mask. In bf16 it is SDPA, which was faster. All texts of a case are equally
long, and greedy, which is PyTorch's best case. PyTorch's compiler has no setting for programmatic dependent
launch in 2.11; in 2.13 TORCHINDUCTOR_ENABLE_PDL=1 is one.

The limit of a step is the larger of two times: of reading the weights, and the keys and values so far, at the
bandwidth of a kernel that only reads; and of the multiplications, in fp32 at the peak of FMA, in bf16 at that
of PyTorch's product of two large matrices. All is measured in the same run. Weights and caches of few texts
stay in the L2 cache; what counts there is a step's latency, not this limit.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import generation as bench
from benchmarks.peers import Peer
from benchmarks.peers.pytorch import CachedPyTorch, Transformers
from shakespeare.attention_ext.parts import BuildError, CachePrecision, Dtype, Precision
from shakespeare.attention_ext.webgpu.gpu import opened
from shakespeare.generation.engines.table import ENGINES
from shakespeare.generation.sampling import Sampling
from shakespeare.lab.cuda.gpu import Gpu
from shakespeare.lab.machine import describe
from shakespeare.model import load
from shakespeare.model.gpt import GPT

DEVICE = "cuda"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_ERROR = {"fp32": Peer.most_error, "bf16": 0.5}  # of logits
GREEDY = Sampling(temperature=0)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of one query a head, (B, H, 1, d), over the keys that are `seen`, by the faster way."""
    if q.dtype is not torch.float32:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


class GraphPyTorch(CachedPyTorch):
    """The loop as a CUDA graph: one of a step for each batch size, one for each length of a prompt alone."""

    name = f"PyTorch {torch.__version__}, CUDA graph"
    graphed, compiled = True, False

    def __init__(self, model: GPT, threads: int, device: str, dtype: torch.dtype) -> None:
        super().__init__(model, threads, device, dtype)
        self.steps: dict[int, Callable[[], object]] = {}
        self.prompts: dict[int, tuple[Tensor, Tensor, Callable[[], object]]] = {}
        self.tokens: dict[int, Tensor] = {}  # (T_max + 1, B), of each batch size
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # of the token to be read

    def step(self, B: int) -> None:
        """Read the token at `position` of each text, and store the likeliest next one."""
        c, at, tokens = self.config, self.position, self.tokens[B]
        C, T = c.n_embd, c.block_size
        x = F.embedding(tokens.index_select(0, at)[0], self.wte) + self.wpe.index_select(0, at)  # (B, C)
        seen = (torch.arange(T, device=self.device) <= at)[None, None, None]
        for (ln_1, c_attn, c_proj, ln_2, c_fc, down), cache in zip(self.layers, self.cache(B)):
            qkv = F.linear(F.layer_norm(x, (C,), *ln_1), *c_attn)
            qkv = qkv.view(B, 1, 3, c.n_head, c.head_dim).permute(2, 0, 3, 1, 4)  # (3, B, H, 1, d)
            cache.index_copy_(3, at, qkv[1:])
            y = attend(qkv[0], cache[0], cache[1], seen)  # (B, H, 1, d)
            x = x + F.linear(y.transpose(1, 2).reshape(B, C), *c_proj)
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (C,), *ln_2), *c_fc)), *down)
        likeliest = F.linear(F.layer_norm(x, (C,), *self.ln_f), self.wte).argmax(-1)
        tokens.index_copy_(0, at + 1, likeliest[None])
        self.position += 1

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """The function as a graph, compiled before if this contender is."""
        if self.compiled:
            run = torch.compile(run, fullgraph=True, dynamic=False)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.position.zero_()
                run()
        torch.cuda.current_stream().wait_stream(stream)
        if not self.graphed:
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    @torch.inference_mode()
    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        B, T = len(prompts), len(prompts[0])
        if count == 1:
            return self.first_tokens(prompts)
        if B not in self.steps:
            self.tokens[B] = torch.zeros(self.config.block_size + 1, B, dtype=torch.int64, device=self.device)
            self.steps[B] = self.captured(partial(self.step, B))
        ids = torch.tensor(prompts, device=self.device)
        self.tokens[B][T] = self.forward(ids, 0).argmax(-1)
        self.position.fill_(T)
        for _ in range(count - 1):
            self.steps[B]()
        return self.tokens[B][T : T + count].T.tolist()

    def first_tokens(self, prompts: list[list[int]]) -> list[list[int]]:
        """The likeliest token after a prompt each."""
        given = torch.tensor(prompts, device=self.device)
        if given.numel() not in self.prompts:
            ids, out = given.clone(), torch.zeros(len(prompts), 1, dtype=torch.int64, device=self.device)

            def read() -> None:
                out.copy_(self.forward(ids, 0).argmax(-1, keepdim=True))

            self.prompts[given.numel()] = ids, out, self.captured(read)
        ids, out, run = self.prompts[given.numel()]
        ids.copy_(given)
        run()
        return out.tolist()


class CompiledPyTorch(GraphPyTorch):
    """The loop through torch.compile, without a graph."""

    name = f"PyTorch {torch.__version__}, compiled"
    graphed, compiled = False, True


class CompiledGraphPyTorch(GraphPyTorch):
    """The compiled step as a CUDA graph."""

    name = f"PyTorch {torch.__version__}, compiled, CUDA graph"
    compiled = True


KINDS = (CachedPyTorch, GraphPyTorch, CompiledPyTorch, CompiledGraphPyTorch, Transformers)
PEERS: dict[str, Any] = {kind.__name__: kind for kind in KINDS}


class Own(bench.Own):
    """One of our engines, called directly: benchmarks.bulk measures what Python adds to many texts."""

    def __init__(self, model: GPT, contender: bench.Contender, slots: int) -> None:
        super().__init__(model, contender, slots, "webgpu" if contender.engine == "webgpu" else DEVICE)
        for slot in range(slots):
            self.engine.set_sampling(slot, GREEDY)

    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        engine, slots = self.engine, range(len(prompts))
        engine.begin(0, prompts[0])  # all are the same
        engine.read(0)
        if len(slots) > 1:
            engine.copy(0, *slots[1:])
        uniforms, rows = np.zeros((count, len(slots))), list[Any]()
        while (written := sum(map(len, rows))) < count:
            rows.append(engine.write(slots, uniforms[written:], 1.0))
        return np.concatenate(rows).T.tolist()


class Opened(bench.Opened):
    """A contender on a GPU."""

    def made(self, model: GPT) -> Peer:
        contender, dtype = self._contender, self._contender.weights
        if contender.part:
            if contender.engine == "webgpu" and opened().adapter.is_cpu:
                raise BuildError(f"{opened().adapter.name} is a CPU")
            peer: Peer = Own(model, contender, self._case.batch)
        else:
            peer = PEERS[contender.engine](model, 1, DEVICE, DTYPES[dtype])
            peer.name += f" {dtype}"
        peer.most_error = MOST_ERROR[dtype]
        return peer


def limit(case: bench.Case, dtype: str, gpu: Gpu) -> tuple[float, str]:
    """(seconds of a case that the GPU allows, the bound of it)."""
    c = load(case.model).config
    context = case.prompt + (case.count - 1) / 2
    size = Dtype(dtype).bytes
    cached = 2 * c.n_layer * c.n_embd * context  # numbers of a text
    steps, tokens = (case.count, case.batch) if case.count > 1 else (1, case.prompt)
    moved = size * (c.num_params + case.batch * cached)
    operations = 2 * tokens * (c.num_params + (cached if case.count > 1 else cached / 2))
    peak = gpu.fma_peak() if dtype == "fp32" else gpu.tensor_peak(Dtype.BF16)
    times = {"memory": moved / gpu.bandwidths()["read"], f"{dtype} products": operations / peak}
    bound = max(times, key=lambda name: times[name])
    return steps * times[
        bound
    ], f"a step moves {moved / 1e6:,.1f} MB and takes {operations / 1e9:,.2f} GFLOP: {bound}"


def compare(
    cases: Sequence[str], engines: Sequence[str], dtypes: Sequence[str], peers: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Verify, time and print all cases; the figures, and the machine."""
    torch.set_num_threads(1)  # what is expected comes from the CPU, a token at a time
    gpu = Gpu()
    on = gpu.describe()
    click.echo(f"{on['name']}, PyTorch {torch.__version__}, CUDA {on['cuda']}")
    contenders = [bench.Contender(name, "part4") for name in engines if "cuda" in ENGINES[name].devices]
    if "webgpu" in engines:
        contenders.append(bench.Contender("webgpu", "part4"))
    contenders += [bench.Contender(name) for name in PEERS if name in peers]
    found: dict[str, dict[str, Any]] = {}
    for title, dtype in itertools.product(cases, dtypes):
        case = bench.CASES[title]
        given = {"weights": Precision(dtype), "kv_cache": CachePrecision(dtype)}
        torch.compiler.reset()  # a function is compiled for eight shapes and models at most
        # webgpu has no other weights
        asked = [replace(each, **given) for each in contenders if each.engine != "webgpu" or dtype == "fp32"]  # type: ignore[arg-type]
        failed: dict[str, str] = {}
        ready = bench.open_all({each.name: Opened(each, title, 1) for each in asked}, failed)
        model = load(case.model).model
        torch.manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (max(100, case.prompt),)).tolist()
        prompt = ids if case.prompt > 1 else [0]
        by_name = {each.get("name"): each for each in ready}
        figures, first = bench.verify(case, model, by_name, ids, prompt, failed, "part0")
        repeats = {name: max(1, round(bench.LEAST_SECONDS / seconds)) for name, seconds in first.items()}

        def turn(name: str) -> None:
            call = partial(by_name[name].call, *bench.task(case, prompt))
            figures[name]["seconds"].append(sum(call()[0] for _ in range(repeats[name])) / repeats[name])

        def warm_up(name: str) -> None:  # the first call compiled and captured
            by_name[name].call(*bench.task(case, prompt))

        bench.in_rounds(1, repeats, warm_up, failed)
        figures |= bench.in_rounds(rounds, repeats, turn, failed)
        seconds, bound = limit(case, dtype, gpu)
        what = f"{case.prompt} + {case.count} tokens, batch {case.batch}"
        click.echo(f"\n{title}, {dtype}: {case.model}, {what}\n")
        bench.show(case, figures | {bench.MEMORY_LIMIT: {"seconds": [seconds]}})
        click.echo(f"\nLimit: {bound}")
        found[f"{title} {dtype}"] = figures
        ready.clear()
        by_name.clear()
        torch.cuda.empty_cache()
    return {"machine": describe() | {"gpu": on | {"bandwidths": gpu.bandwidths()}}, "cases": found}
