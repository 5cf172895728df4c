"""Texts from a model:

from generation import generate, load
print(generate(load("shakes256"), prompt="ROMEO:", max_new_tokens=200, part="part4", seed=1))
"""

from generation.generate import generate
from model.checkpoint import load

__all__ = ["generate", "load"]
