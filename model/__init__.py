"""The GPT, its checkpoints, its vocabularies and its training. It knows no part: attention is handed in."""

from model.checkpoint import load

__all__ = ["load"]
