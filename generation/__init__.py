"""Texts from a model: texts.generate(), the engines that run the model, and many texts at a time."""
