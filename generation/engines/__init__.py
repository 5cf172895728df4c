"""The engines that run a model for texts."""
