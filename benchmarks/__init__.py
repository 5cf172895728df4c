"""Benchmarks of this repository against other engines."""
