"""What each of a Triton kernel's tiles takes of a GPU: compiled for one, and on one timed by triton.autotune.

python -m shakespeare.judge.triton_tiles FILE SIZE ARCH

prints them as JSON. It runs the file, so they describe and prove nothing: the speed is not taken from here.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shakespeare.attention_ext import user_kernel
from shakespeare.attention_ext.parts import Dtype
from shakespeare.judge.diagnosis import Finding
from shakespeare.judge.speed import Size, Stop, from_process
from shakespeare.lab.cuda.architectures import SHEETS

Tiles = list[dict[str, Any]]


def swept(file: Path, size: Size, stop: Stop = None, arch: str = "sm_90") -> Tiles | Finding:
    """The tiles of a file, the fastest first, or why there are none: of kind 'compile' if Triton refuses it.

    Each has its kernel; arch, as given without a GPU; sizes, such as BLOCK_M; warps; stages; registers and
    spilled bytes of a thread; shared bytes of a program, and whether it fits; ms, or None. [] for a file
    without Triton. Raises Stopped if stop().
    """
    if not user_kernel.read(file).triton:
        return []
    return from_process(__name__, file, size, stop, "they were not compiled", arch, TRITON_INTERPRET="0")


def absent_gpu(arch: str) -> Any:
    """Triton's driver of a GPU that is not there: kernels are compiled for it, and a launch does nothing."""
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", int(arch[3:]), 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_device_properties=lambda device: {"max_shared_mem": SHEETS[arch].shared},
        load_binary=lambda *binary: (0, 0, 0, 0, 1024),  # module, function, registers, spills, most threads
        launcher_cls=lambda source, metadata: lambda *call: None,
        get_benchmarker=lambda: lambda call, quantiles: [call() or 0.0] * 3,
    )
    driver.utils = driver
    return driver


def compiled(file: Path, size: Size, arch: str) -> Tiles:
    """Compile the file's kernels by a call; on a GPU time their tiles. Raises what the file raises."""
    import torch
    import triton

    on_gpu = user_kernel.has_gpu()
    rows = Tiles()
    if not on_gpu:
        triton.runtime.driver.set_active(absent_gpu(arch))

    def keep(src: Any, metadata: Any, metadata_group: Any, **_: object) -> None:
        (cubin,) = (path for name, path in metadata_group.items() if name.endswith(".cubin"))
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        row = {
            "kernel": src.name,
            "arch": f"sm_{metadata['target'].arch}",
            "shared": metadata["shared"],
            "warps": metadata["num_warps"],
            "stages": metadata["num_stages"],
            "fits": True,
            "ms": None,
        }
        for name, title in (("registers", "REG"), ("spilled", "STACK")):
            row[name] = max(map(int, re.findall(rf"\b{title}:(\d+)", used)))
        constants = src.constants.items()
        rows.append(
            row | {"sizes": {src.fn.arg_names[i]: n for (i, *_), n in constants if i in src.fn.constexprs}}
        )

    triton.knobs.compilation.listener = keep
    module: Any = user_kernel.imported(file)
    like = {"device": "cuda" if on_gpu else "cpu", "dtype": Dtype(size.dtype).torch_dtype}
    q, k, v = (torch.randn(1, size.heads, size.N, size.d, **like) for _ in "qkv")
    if size.backward:
        module.attention_backward(q, k, v, v, q[..., 0].contiguous(), k, size.causal, size.d**-0.5)
    else:
        module.attention(q, k, v, size.causal, size.d**-0.5)
    for tuner in user_kernel.tuned(module):
        for row in (row for row in rows if row["kernel"] == tuner.base_fn.__name__):
            for config, (ms, *_) in getattr(tuner, "configs_timings", {}).items():
                chosen = row["sizes"] | config.kwargs, config.num_warps, config.num_stages
                if chosen == (row["sizes"], row["warps"], row["stages"]):
                    row["fits"] = ms < math.inf
                    row["ms"] = ms if on_gpu and ms < math.inf else None
            row["sizes"] = {name: row["sizes"][name] for name in tuner.configs[0].kwargs}
    return sorted(rows, key=lambda row: row["ms"] or math.inf)


def main(file: Path, size: str, arch: str) -> None:
    """Print the tiles, or the Finding of a kernel that Triton refuses."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what the file prints
    try:
        answer: Any = compiled(file, Size(**json.loads(size)), arch)
    except Exception as error:
        why = user_kernel.reason(error, file)
        if not type(error).__module__.startswith("triton"):
            raise SystemExit(why) from None
        answer = {"kind": "compile", "sentence": f"Triton does not compile it: {why}"}
    os.write(answers, json.dumps(answer).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
