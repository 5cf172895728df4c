"""The lab on a GPU: its limits and how calls are timed, and gpt.py explain's counts for CUDA kernels."""
