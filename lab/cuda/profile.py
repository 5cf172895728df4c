"""gpt.py profile --device cuda: where a token's time goes in the cuda engine, by clocks in the kernel."""

import time
from typing import Any

from shakespeare.attention_ext.parts import CachePrecision, Precision
from shakespeare.generation.engines.cuda import CudaEngine, gpu
from shakespeare.generation.engines.engine import member
from shakespeare.generation.request import Uniforms
from shakespeare.lab.profile import lengths
from shakespeare.lab.text import markdown
from shakespeare.model.checkpoint import Checkpoint

REPETITIONS = 5


def run(
    checkpoint: Checkpoint,
    *,
    model: str,
    texts: int,
    weights: str,
    kv_cache: str,
    prompt_tokens: int | None,
    tokens: int | None,
) -> dict[str, Any]:
    """The figures of `tokens` tokens of each of so many texts; arguments of lab.profile.run().

    us: microseconds of a step's phases, by the first block's cycles at the highest clock. step_us: without
    the clocks. Raises ValueError and BuildError as open_engine() does.
    """
    prompt_tokens, tokens = lengths(checkpoint, prompt_tokens, tokens)
    ids = [i % checkpoint.config.vocab_size for i in range(prompt_tokens)]
    best: dict[bool, tuple[float, dict[str, int]]] = {}
    for clocks in (False, True):
        precisions = member(Precision, "weights", weights), member(CachePrecision, "kv_cache", kv_cache)
        engine = CudaEngine(checkpoint, *precisions, texts, checkpoint.config.block_size, clocks)
        uniforms = Uniforms(0)
        for _ in range(REPETITIONS):
            engine.begin(0, ids)
            engine.read(0)
            engine.copy(0, *range(1, texts))
            rows = [uniforms(texts) for _ in range(tokens)]
            start = time.perf_counter()
            written = len(engine.write(range(texts), rows, float("inf")))
            seconds = (time.perf_counter() - start) / written
            if clocks not in best or seconds < best[clocks][0]:
                best[clocks] = seconds, {name: n // written for name, n in engine.cycles().items()}
    us = {name: 1e6 * cycles / gpu().hertz for name, cycles in best[True][1].items()}
    sizes = {"texts": texts, "prompt_tokens": prompt_tokens, "new_tokens": tokens}
    about = {"model": model, "engine": engine.description, "weights": weights, "kv_cache": kv_cache}
    return about | sizes | {"us": us, "step_us": 1e6 * best[False][0]}


def table(f: dict[str, Any]) -> str:
    """The figures as Markdown."""
    total = sum(f["us"].values())
    rows = [(name, f"{us:.2f}", f"{100 * us / total:.1f} %") for name, us in f["us"].items()]
    shown = markdown(("", "µs per step", "share"), [*rows, ("all, with clocks", f"{total:.2f}", "100 %")])
    return (
        f"{f['model']}: {f['engine']}, weights in {f['weights']}, cache in {f['kv_cache']}; {f['texts']} "
        f"texts, a prompt of {f['prompt_tokens']} tokens, then {f['new_tokens']} more\n\n{shown}\n\n"
        f"Without clocks, with the call: {f['step_us']:.2f} µs per step, "
        f"{1e6 * f['texts'] / f['step_us']:,.0f} tokens/s\n"
        f"The fastest of {REPETITIONS} calls; waiting is the time until other blocks' data are there"
    )
