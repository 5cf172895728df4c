"""Attention against PyTorch and ONNX Runtime: `gpt.py bench` over the cases of the README.

    python -m benchmarks.attention [CONTENDERS] [options of gpt.py bench that go with a sweep]

Each contender gets the inputs in its preferred layout. Without CONTENDERS all parts that take the --dtype,
PyTorch's SDPA and, if it is installed and takes the dtype, ONNX Runtime take part. --save without a file
means benchmarks/results/attention-PROCESSOR.json, with --dtype bf16 attention_bf16-PROCESSOR.json.
"""

import sys
from importlib.util import find_spec

from shakespeare.app import cli
from shakespeare.attention_ext.parts import Dtype, taking
from shakespeare.lab import saved

SWEEP = ["-N", "128,1024", "-d", "32,64,128", "--rounds", "15"]
MASKS = ["--mask", "none,causal"]


def arguments(given: list[str]) -> list[str]:
    """The arguments of gpt.py; of an option given twice, the last counts."""
    # bench itself refuses a dtype that does not exist
    dtype = Dtype.BF16 if "bf16" in given or "--dtype=bf16" in given else Dtype.FP32
    given = with_file(given, "attention" if dtype is Dtype.FP32 else "attention_bf16")
    sweep = SWEEP if "--causal" in given else [*SWEEP, *MASKS]
    if given and not given[0].startswith("-"):
        return ["bench", given[0], *sweep, *given[1:]]
    with_onnx = dtype is Dtype.FP32 and find_spec("onnx") and find_spec("onnxruntime")
    return ["bench", ",".join([*taking(dtype), "sdpa", *["onnx"] * bool(with_onnx)]), *sweep, *given]


def with_file(given: list[str], kind: str) -> list[str]:
    """The arguments, with a file for a bare --save: bench's default file holds another sweep."""
    for at, (word, after) in enumerate(zip(given, [*given[1:], "-"])):
        if word == "--save" and after.startswith("-"):
            return [*given[: at + 1], str(saved.default_file(kind)), *given[at + 1 :]]
    return given


if __name__ == "__main__":
    cli.main(arguments(sys.argv[1:]))
