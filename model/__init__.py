"""The GPT, its checkpoints and vocabularies. It imports no part: attention is an argument."""

from shakespeare.model.checkpoint import load

__all__ = ["load"]
