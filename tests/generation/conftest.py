"""The jobs that the tests of bulk and of its cluster write, and the bytes that they must give."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
from bulk_jobs import SIZE, SLOW, TEXTS, TOKENS, asking, files, processes, run
from support import full

from shakespeare import load
from shakespeare.attention_ext import PARTS, default_tile
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.parts import BuildError, CachePrecision, Precision
from shakespeare.generation.engines import layouts
from shakespeare.generation.engines.engine import EngineOptions, Unfit
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.many import shards
from shakespeare.generation.many.jobs import Job
from shakespeare.generation.many.shards import Settings
from shakespeare.generation.request import Request
from shakespeare.model import checkpoint

# Each engine, and each part in the native one. By default one kernel stands for all.
ENGINES = [
    *(("part0", "torch"), ("part4", "native"), ("part4", "torch")),
    *(full((part, "native")) for part, row in PARTS.items() if row.operator and part != "part4"),
    *(full(("part4", name)) for name in ("cuda", "webgpu")),
]


@pytest.fixture(scope="session")
def no_cuda_engine() -> str | None:
    """Why no GPU here runs the cuda engine, or None."""
    try:
        layouts.layouts_for(tiny.gpt().config, Precision.FP32, CachePrecision.FP32, driver.gpu())
    except (BuildError, Unfit) as error:
        return str(error)
    return None


@pytest.fixture(params=ENGINES, ids=" ".join)
def engine(request):
    """Run the test for each part in each of its engines; opens an engine of a model."""
    part, name = request.param
    if name == "cuda":
        if request.getfixturevalue("no_cuda_engine"):  # small blocks, because each thread takes turns here
            request.getfixturevalue("emulated")(request.getfixturevalue("monkeypatch"), 32, (2,))
        return partial(open_engine, engine=name, part=part, device="cuda")
    if name == "webgpu":
        request.getfixturevalue("adapter")
        return partial(open_engine, engine=name, part=part, device="webgpu")
    if PARTS[part].operator:
        request.getfixturevalue("extension")
    return partial(open_engine, engine=name, part=part)


@pytest.fixture(scope="session")
def model(tmp_path_factory, extension) -> Path:
    directory = tmp_path_factory.mktemp("model")
    checkpoint.save(directory, tiny.gpt(), tiny.VOCABULARY, {})
    return directory


@pytest.fixture(scope="session")
def settings(model) -> Settings:
    checkpoint = load(str(model))
    request = Request(tuple(checkpoint.tokenizer.encode("\n")), max_new_tokens=TOKENS, seed=5)
    br, bc = default_tile.DEFAULT
    engine = EngineOptions(threads=1, capacity=checkpoint.config.block_size, br=br, bc=bc)
    return Settings(str(model), shards.fingerprint(checkpoint), engine, request, "jsonl")


@pytest.fixture(scope="session")
def job(settings) -> Job:
    return Job(settings, TEXTS, SIZE)


@pytest.fixture(scope="session")
def expected(job, tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("expected")
    run(job, directory)
    assert len(files(directory)) == 12
    return files(directory)


@pytest.fixture(scope="session")
def slow(job) -> Job:
    return replace(job, settings=asking(job.settings, max_new_tokens=SLOW))


@pytest.fixture(scope="session")
def slow_expected(slow, tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("slow")
    run(slow, directory, processes(2))
    return files(directory)
