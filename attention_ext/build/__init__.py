"""Compiles the extension once, just in time.

toolchain: the compilers and how they are called. cache: where what they make is kept, for whom, and who makes
it. recipes: what is compiled, from which sources, with which flags.
"""
