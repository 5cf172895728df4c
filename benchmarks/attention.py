"""Attention against PyTorch and ONNX Runtime: `gpt.py bench` over the cases that the README shows.

    python benchmarks/attention.py [CONTENDERS] [options of gpt.py bench that go with a sweep]

Each contender gets the inputs in the layout it likes best. Without CONTENDERS all parts, PyTorch's SDPA and,
if it is installed, ONNX Runtime take part.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpt  # noqa: E402

CASES = ["-N", "128,1024", "-d", "32,64,128", "--rounds", "15"]
MASKS = ["--mask", "none,causal"]


def arguments(given: list[str]) -> list[str]:
    """gpt.py's arguments; of an option that is given twice the last counts."""
    cases = CASES if "--causal" in given else [*CASES, *MASKS]
    if given and not given[0].startswith("-"):
        return ["bench", given[0], *cases, *given[1:]]
    onnx = ["onnx"] if find_spec("onnx") and find_spec("onnxruntime") else []
    return ["bench", ",".join([*gpt.PARTS, "sdpa", *onnx]), *cases, *given]


if __name__ == "__main__":
    sys.argv[1:] = arguments(sys.argv[1:])
    gpt.main()
