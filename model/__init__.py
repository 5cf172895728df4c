"""The model, its checkpoints, and the two calls that write text:

from model import load, generate
print(generate(load("shakes256"), prompt="ROMEO:", max_new_tokens=200, part="part4", seed=1))
"""

from model.checkpoint import load
from model.generate import generate

__all__ = ["generate", "load"]
