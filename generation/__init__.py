"""Generate text from a model:

from generation import generate, load
print(generate(load("shakes256"), prompt="ROMEO:", max_new_tokens=200, part="part4", seed=1))

Import it before torch: PyTorch's threads then sleep while they wait, so a busy core does not stall them.
"""

from attention_ext import processor

processor.let_waiting_threads_sleep()

from generation.generate import generate  # noqa: E402
from model.checkpoint import load  # noqa: E402

__all__ = ["generate", "load"]
