"""Whose attention a file calls: another library's, or a part of this project, is not a kernel of its own.

watch() runs in the player before the file is loaded; the rest is the judge's.
"""

import importlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from shakespeare.attention_ext import user_kernel
from shakespeare.attention_ext.build import recipes
from shakespeare.attention_ext.parts import PARTS

SDPA = "scaled_dot_product_attention"
# Operators of PyTorch that compute attention: what is said of each. Those above them call one of these.
OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu": SDPA,
    "_scaled_dot_product_attention_math": SDPA,
    "_scaled_dot_product_flash_attention": SDPA,
    "_scaled_dot_product_efficient_attention": SDPA,
    "_scaled_dot_product_cudnn_attention": f"{SDPA} of cuDNN",
    "_flash_attention_forward": "_flash_attention_forward",
    "_efficient_attention_forward": "_efficient_attention_forward",
    "_cudnn_attention_forward": "cuDNN's attention",
    "_native_multi_head_attention": "MultiheadAttention",
    "_transformer_encoder_layer_fwd": "TransformerEncoderLayer",
}
# Names in the text of a file in Python.
NAMED = re.compile(
    rf"\b({SDPA}|MultiheadAttention|multi_head_attention_forward|flex_attention|flash_attn\w*|xformers"
    r"|memory_efficient_attention|\w*einsum|cudnn\w*|shakespeare|onnxruntime|autograd\.grad|requires_grad_)\b"
)
KERNELS = [part.operator.partition("_")[2] for part in PARTS.values() if part.operator]
PART_NAMES = re.compile(rf"\b({'|'.join(KERNELS)})_(?:attention|backward)\b|\bcpu/(part\d_\w+)\.cpp")
LIBRARIES = re.compile(r"/(libtorch_cpu|libcudnn\w*|libdnnl|libmkl\w*|onnxruntime\w*)[.\w-]*$", re.M)
EXTENSION = re.compile(r"/attention_ext(?!_user_kernel)\w*/[^/\n]*\.so$", re.M)


def watch(note: Callable[[str], object], with_torch: bool) -> None:
    """Note each call of another's attention, and of NumPy's einsum, in this process."""
    numpy: Any = importlib.import_module("numpy")

    def noted(function: Any, name: str = "einsum") -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            note(name)
            return function(*arguments, **named)

        return call

    numpy.einsum = noted(numpy.einsum)
    if with_torch:
        _watch_torch(note)
        flex: Any = importlib.import_module("torch._higher_order_ops.flex_attention").flex_attention
        flex.py_kernels = {key: noted(kernel, "flex_attention") for key, kernel in flex.py_kernels.items()}


def _watch_torch(note: Callable[[str], object]) -> None:
    import torch

    watched = torch.library.Library("aten", "IMPL")
    gradients = {f"{name.removesuffix('_forward')}_backward": label for name, label in OPERATORS.items()}
    for operator, name in (OPERATORS | gradients).items():
        for key in ("CPU", "CUDA"):
            try:
                kernel = torch.library.get_kernel(f"aten::{operator}", key)
            except RuntimeError:  # this build has none
                continue

            def call(keys: Any, *arguments: Any, kernel: Any = kernel, name: str = name, **named: Any) -> Any:
                note(name)
                return kernel.call_boxed(keys, *arguments, **named)

            watched.impl(operator, call, key, with_keyset=True)
    _registered.append(watched)


_registered: list[Any] = []  # what is registered as long as this lives


def in_text(file: Path, sources: Sequence[Path]) -> set[str]:
    """What a file's sources name in their text, and for C++ in its object, which must have been compiled."""
    text = user_kernel.joined(sources)
    if file.suffix == ".py":
        return set(NAMED.findall(re.sub(r"#.*|(\"\"\"|''')[\s\S]*?\1", "", text)))  # not in words
    if file.suffix == ".cu":
        return set()
    recipe = recipes.user_kernel(file)
    included = "\n".join(map(str, recipe.first_read()))
    nm = shutil.which("nm")
    if nm:
        command = [nm, "--undefined-only", "--demangle", str(recipe.first_object())]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return {f"{a}_attention" if a else b for a, b in PART_NAMES.findall(f"{text}\n{included}")}


def in_memory(pid: int, with_torch: bool) -> set[str]:
    """The libraries with attention in a process; with_torch: those of PyTorch are not counted."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except PermissionError:
        return {"what it hides in its memory"}
    except OSError:  # not Linux
        return set()
    parts = {"this project's parts"} if EXTENSION.search(maps) else set()
    return parts | set(() if with_torch else LIBRARIES.findall(maps))


def sentence(names: Iterable[str]) -> str:
    """What is said of them; '' for none."""
    named = ", ".join(sorted(names))
    return f"calls {named}: not a kernel of its own" if named else ""
