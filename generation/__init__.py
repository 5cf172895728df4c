"""Generate text from a model:

from generation import generate, load
print(generate(load("shakes256"), prompt="ROMEO:", max_new_tokens=200, part="part4", seed=1))

The native engine, which parts 1 to 4 use, needs no torch. Import generation before torch: PyTorch's threads
then sleep while they wait, so a busy core does not stall them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from generation.texts import generate as generate
    from model.checkpoint import load as load

__all__ = ["generate", "load"]


def __getattr__(name: str) -> Any:
    """Import generate() and load() when they are first used."""
    if name not in __all__:
        raise AttributeError(f"module 'generation' has no attribute {name!r}")
    from attention_ext import processor

    processor.let_waiting_threads_sleep()
    from generation.texts import generate
    from model.checkpoint import load

    globals().update(generate=generate, load=load)
    return globals()[name]
