"""The cuda engine without a GPU: its driver and its kernel run on the CPU, emulator.cpp says how."""

import contextlib
import ctypes
import functools
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from shakespeare.attention_ext.build.nvrtc import SOURCES
from shakespeare.attention_ext.cuda import driver as cuda_driver
from shakespeare.attention_ext.cuda.launches import Gpu
from shakespeare.attention_ext.parts import BuildError
from shakespeare.generation.engines import layouts

HERE = Path(__file__).resolve().parent


def build(work: Path, kernel: str, macros: dict[str, object]) -> None:
    """Build emulator.so of a kernel's file in a folder, with the headers here in place of those with PTX."""
    shutil.copytree(HERE, work, dirs_exist_ok=True)
    for name in ("call.h", "arguments.h"):
        shutil.copy(SOURCES / name, work)
    flags = "-std=c++17 -O1 -U_FORTIFY_SOURCE -fno-strict-aliasing -shared -fPIC -w".split()
    flags += [f"-D{name}={value}" for name, value in (macros | {"KERNEL": f'"{kernel}"'}).items()]
    command = ["g++", *flags, "emulator.cpp", "-o", "emulator.so"]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(done.stderr[:2000])


class Driver:
    """What the cuda engine calls of CUDA's driver, over the memory of this process."""

    CU_MEMHOSTALLOC_PORTABLE = 0

    def __init__(self) -> None:
        self._held: dict[int, np.ndarray] = {}
        self._seeds = itertools.count()

    def cuMemAlloc(self, size: int) -> tuple[int, int]:
        memory = np.full(size + 64, 0xFF, np.uint8)
        address = -(-memory.ctypes.data // 64) * 64
        self._held[address] = memory
        return 0, address

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[int, int]:
        return self.cuMemAlloc(size)

    def cuMemFree(self, address: int) -> tuple[int]:
        del self._held[address]
        return (0,)

    cuMemFreeHost = cuMemFree

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[int]:
        ctypes.memset(address, value, size)
        return (0,)

    def cuMemcpyHtoD(self, to: int, origin: int, size: int, stream: object = None) -> tuple[int]:
        ctypes.memmove(to, origin, size)
        return (0,)

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: object) -> tuple[int]:
        return self.cuMemsetD8(address, value, size)

    cuMemcpyDtoH = cuMemcpyHtoDAsync = cuMemcpyDtoDAsync = cuMemcpyHtoD

    def cuStreamSynchronize(self, stream: object) -> tuple[int]:
        return (0,)

    def cuLaunchKernelEx(self, config: object, function: object, pointers: int, extra: int) -> tuple[int]:
        work = ctypes.c_void_p.from_address(pointers)
        if function(work, config.gridDimX, next(self._seeds)):
            raise AssertionError("the blocks wait for each other forever")
        return (0,)


class Device:
    """A GPU of two clusters or five blocks at most. directory: where kernels are built, for all workers."""

    stream = None
    on = Gpu("the CPU", (9, 0), 227 * 1024, 3, l2=10**7, hertz=1e9, memory=1 << 20, identity="none")

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.prepared: list[tuple[layouts.Layout, int]] = []

    def activate(self) -> None:
        pass

    def prepare(self, kernels: Iterable[tuple[layouts.Layout, int]]) -> None:
        """Note what a GPU would compile; here each is compiled when it is launched."""
        self.prepared += dict.fromkeys(kernels)

    def clusters(self, layout: layouts.Cluster, drafts: bool = False) -> int:
        return 2

    def resident(self, layout: layouts.Grid, texts: int) -> int:
        return 5

    def launch(self, layout: layouts.Layout, texts: int, blocks: int) -> SimpleNamespace:
        return SimpleNamespace(gridDimX=blocks)

    @functools.cache
    def kernel(self, layout: layouts.Layout, texts: int) -> tuple:
        source = layout.source(texts, self.on.capability)
        work = self._directory / source.fingerprint()
        if not work.is_dir():
            self._directory.mkdir(exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=self._directory))
            shutil.copytree(layouts.SOURCES, made, dirs_exist_ok=True)
            build(made, source.file, {"BLOCKS": 1} | source.macros)
            with contextlib.suppress(OSError):  # another worker was first
                made.rename(work)
        library = ctypes.CDLL(work / "emulator.so")
        library.run.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        return library.run, library


def install(directory: Path, monkeypatch, threads: int, clusters: tuple[int, ...]) -> None:
    """Let the cuda engine run here, with threads a block and sizes of clusters, built in a directory."""
    driver, device = Driver(), Device(directory)
    monkeypatch.setattr(cuda_driver, "bindings", lambda: driver)
    monkeypatch.setattr(cuda_driver, "gpu", lambda: device.on)
    monkeypatch.setattr(layouts, "device", lambda: device)
    for name, value in (("THREADS", threads), ("CLUSTERS", clusters)):
        monkeypatch.setattr(layouts, name, value)
