"""Measurements through WebGPU."""
