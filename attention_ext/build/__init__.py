"""Compiles the extension on first use.

toolchain: finds and runs the compilers. cache: where builds are kept, who may write there, one build at a
time. recipes: what is compiled, from which sources, with which flags.
"""
