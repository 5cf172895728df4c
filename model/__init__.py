"""The GPT, its checkpoints, vocabularies and training. It imports no part: attention is an argument."""

from model.checkpoint import load

__all__ = ["load"]
