"""The training step on a GPU. Not imported without one."""
