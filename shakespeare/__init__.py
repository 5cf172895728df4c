"""A small GPT that writes Shakespeare, and the attention in it:

from shakespeare import attention, generate, load
print(generate(load("shakes256"), prompt="ROMEO:", max_new_tokens=200, part="part4", seed=1))

The native engine, which parts 1 to 4 use, needs no torch. Import shakespeare before torch: PyTorch's threads
then sleep while they wait, so a busy core does not stall them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if not (Path(__file__).parent / "model").is_dir():  # git wrote links as text files
    raise ImportError(
        "the links in shakespeare/ are missing; turn on links (on Windows: Developer Mode), then run: "
        "git config core.symlinks true && git checkout -- shakespeare"
    )

if TYPE_CHECKING:
    from shakespeare.attention_ext import attention as attention
    from shakespeare.generation.texts import generate as generate
    from shakespeare.model.checkpoint import load as load

__all__ = ["attention", "generate", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what __all__ names when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'shakespeare' has no attribute {name!r}")
    from shakespeare.attention_ext import attention, processor

    processor.let_waiting_threads_sleep()
    from shakespeare.generation.texts import generate
    from shakespeare.model.checkpoint import load

    globals().update(attention=attention, generate=generate, load=load)
    return globals()[name]
