"""A model from a text: recipes, optimizers, the training step and its run."""
