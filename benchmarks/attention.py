"""Attention against PyTorch and ONNX Runtime: `gpt.py bench` over the cases of the README.

    python benchmarks/attention.py [CONTENDERS] [options of gpt.py bench that go with a sweep]

Each contender gets the inputs in its preferred layout. Without CONTENDERS all parts that take the --dtype,
PyTorch's SDPA and, if it is installed and takes the dtype, ONNX Runtime take part. --save without a file
means benchmarks/results/attention-PROCESSOR.json, with --dtype bf16 attention_bf16-PROCESSOR.json.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app import cli  # noqa: E402
from attention_ext.parts import Dtype, taking  # noqa: E402
from lab import saved  # noqa: E402

SWEEP = ["-N", "128,1024", "-d", "32,64,128", "--rounds", "15"]
MASKS = ["--mask", "none,causal"]


def arguments(given: list[str]) -> list[str]:
    """The arguments of gpt.py; of an option given twice, the last counts."""
    dtype = dtype_of(given)
    given = with_file(given)
    sweep = SWEEP if "--causal" in given else [*SWEEP, *MASKS]
    if given and not given[0].startswith("-"):
        return ["bench", given[0], *sweep, *given[1:]]
    with_onnx = dtype is Dtype.FP32 and find_spec("onnx") and find_spec("onnxruntime")
    return ["bench", ",".join([*taking(dtype), "sdpa", *["onnx"] * bool(with_onnx)]), *sweep, *given]


def dtype_of(given: list[str]) -> Dtype:
    """The dtype among the arguments; bench itself refuses one that does not exist."""
    return Dtype.BF16 if "bf16" in given or "--dtype=bf16" in given else Dtype.FP32


def with_file(given: list[str]) -> list[str]:
    """The arguments, with a file for a bare --save: bench's default file holds another sweep."""
    for at, (word, after) in enumerate(zip(given, [*given[1:], "-"])):
        if word == "--save" and after.startswith("-"):
            kind = "attention" if dtype_of(given) is Dtype.FP32 else "attention_bf16"
            return [*given[: at + 1], str(saved.default_file(kind)), *given[at + 1 :]]
    return given


if __name__ == "__main__":
    cli.main(arguments(sys.argv[1:]))
