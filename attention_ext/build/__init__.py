"""Compiles the extension on first use."""
