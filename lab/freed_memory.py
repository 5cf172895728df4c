"""How glibc keeps freed memory: its pages are cleared when a call gets them anew."""

import ctypes


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, up to 2 GB in all; other C libraries are not changed.

    By default glibc may return a large block at once, and the pages of the next one are cleared again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD of malloc.h
        mallopt(-4, 0)  # M_MMAP_MAX


def return_freed_memory() -> None:
    """Let glibc return freed memory to the system; other C libraries are not changed.

    Otherwise a large block gets the pages of the one before it, whose position in memory changes the time.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))
