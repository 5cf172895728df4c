"""The processor of this machine, as the system describes it."""

import contextlib
import functools
import math
import os
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CPUS = Path("/sys/devices/system/cpu")
GROUPS = Path("/sys/fs/cgroup")
GROUPS_OF_PROCESS = Path("/proc/self/cgroup")
IDENTIFIER = os.environ.get("PROCESSOR_IDENTIFIER", "")  # Windows' 'AMD64 Family 25 Model 97 Stepping 2, ...'
AVX2 = {"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}  # and what comes with it
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Windows' numbers of features, and what those of Linux come with each. It has none for AVX-512's extensions:
# AVX512F alone tells of no more than AVX2, but each design of MICROARCHITECTURES that has it has VNNI too.
FEATURES_OF_WINDOWS = {40: AVX2, 41: AVX512 | {"avx512_vnni"}, 43: {"asimddp"}}
VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
# (vendor, family, ranges of models, name), as Linux names them; in a cloud the model's name is often only
# 'AMD EPYC'. The last number of a range is included.
MICROARCHITECTURES = (
    ("AMD", 25, ((0x00, 0x0F), (0x20, 0x5F)), "Zen 3"),
    ("AMD", 25, ((0x10, 0x1F), (0x60, 0xAF)), "Zen 4"),
    ("AMD", 26, ((0x00, 0x2F), (0x40, 0x4F), (0x60, 0x7F)), "Zen 5"),
    ("Intel", 6, ((106, 106), (108, 108)), "Ice Lake"),
    ("Intel", 6, ((143, 143),), "Sapphire Rapids"),
    ("Intel", 6, ((207, 207),), "Emerald Rapids"),
    ("Intel", 6, ((173, 174),), "Granite Rapids"),
)


@functools.cache
def name() -> str:
    """The processor's name, for people and as a key of saved results."""
    values = _fields()
    if "model name" in values:
        return "{model name}, family {cpu family}, model {model}".format_map(values)
    if "CPU part" in values:  # ARM
        return "ARM implementer {CPU implementer}, part {CPU part}".format_map(values)
    return _fallback()


def microarchitecture() -> str | None:
    """The processor's design, such as 'AMD Zen 5'; None if MICROARCHITECTURES does not have it."""
    vendor, family, model = _vendor_family_model() or ("", "", "")
    for maker, number, ranges, title in MICROARCHITECTURES:
        if (vendor, family) == (maker, str(number)) and model.isdecimal():
            if any(first <= int(model) <= last for first, last in ranges):
                return f"{maker} {title}"
    return None


def slug(device: str = "") -> str:
    """A device in the name of a file; this processor: 'amd-zen-5', or vendor, family, model: 'intel-6-85'."""
    identity = _vendor_family_model()
    text = device or microarchitecture() or (" ".join(identity) if identity else name())
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def capabilities() -> str:
    """The processor's features that decide what -march=native means, or on ARM -mcpu=native."""
    x86 = ("vendor_id", "cpu family", "model", "stepping", "flags")
    kept = (*x86, "Features", "CPU implementer", "CPU variant", "CPU part")
    known = (f"{field}: {value}" for field, value in _fields().items() if field in kept)
    return "\n".join(known) or _fallback()


def instructions() -> str:
    """The widest vectors of this processor, by PyTorch's names: 'AVX512', 'AVX2' or 'DEFAULT'."""
    if features() >= {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}:
        return "AVX512"
    return "AVX2" if features() >= {"avx2", "fma"} else "DEFAULT"


def features() -> set[str]:
    """The processor's features by Linux' names; of a Mac only those that come with AVX2."""
    if sysctl("hw.optional.avx2_0") == "1":
        return AVX2
    if sys.platform == "win32":
        import ctypes

        has = ctypes.windll.kernel32.IsProcessorFeaturePresent
        numbers = {40, 41, 43} if microarchitecture() else {40, 43}
        return set().union(*(FEATURES_OF_WINDOWS[number] for number in numbers if has(number)))
    return set(f"{_fields().get('flags', '')} {_fields().get('Features', '')}".split())


def threads() -> int:
    """An engine's threads by default: OMP_NUM_THREADS, else one for each physical core; at most cores()."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").strip()
    if wanted.isdecimal() and int(wanted):
        return min(int(wanted), cores())
    siblings = {path.read_text() for path in CPUS.glob("cpu[0-9]*/topology/thread_siblings_list")}
    return min(len(siblings) or _cores_of_windows() or cores(), cores())


def cores() -> int:
    """Processors that this process may use: its affinity, within the CPU quota of its control groups."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in control_groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):  # this file is missing, or has no limit: "max"
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                count = min(count, max(1, math.ceil(quota / period))) if quota > 0 else count
    return count


def control_groups(controller: str) -> list[Path]:
    """The folders of Linux's control groups that limit this process: its own and those above it.

    controller: 'cpu' or 'memory', which has a tree of its own in version 1.
    """
    try:
        lines = GROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controller in controllers.split(",") or not controllers:
            top = GROUPS / controller if controllers else GROUPS
            group = top / path.lstrip("/")  # inside a container only `top` may exist
            found += [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return found


@dataclass(frozen=True)
class Cache:
    """A processor's data cache: its size in bytes, its ways, and the bytes of a line."""

    level: int
    size: int
    ways: int
    line: int


# The caches of a common processor, for systems that report none, or are not asked, as Windows.
ASSUMED = (Cache(1, 32 << 10, 8, 64), Cache(2, 1 << 20, 16, 64), Cache(3, 32 << 20, 16, 64))


def caches() -> tuple[Cache, ...]:
    """This processor's data caches, the smallest first; ASSUMED where the system does not report them."""
    levels = {}
    for index in sorted(CACHES.glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level = int((index / "level").read_text())
            text = (index / "size").read_text().strip()  # such as 1024K
            size = int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1:], 0)
            ways = int((index / "ways_of_associativity").read_text())
            line = int((index / "coherency_line_size").read_text())
        except (OSError, ValueError):
            continue
        if min(size, ways, line) > 0:
            levels[level] = Cache(level, size, ways, line)
    return tuple(levels[level] for level in sorted(levels)) or _caches_of_macos() or ASSUMED


def _caches_of_macos() -> tuple[Cache, ...]:
    """A fast core's caches, with ASSUMED's ways, which macOS does not report; none on other systems."""
    line = sysctl("hw.cachelinesize")
    reported = []
    for assumed, name in zip(ASSUMED, ("l1dcachesize", "l2cachesize", "l3cachesize")):
        size = sysctl(f"hw.perflevel0.{name}") or sysctl(f"hw.{name}")
        if int(size or 0) > 0 and int(line or 0) > 0:
            reported.append(replace(assumed, size=int(size), line=int(line)))
    return tuple(reported)


def _cores_of_windows() -> int:
    """Windows' number of physical cores; 0 on other systems."""
    if sys.platform != "win32":
        return 0
    import ctypes

    ask = ctypes.windll.kernel32.GetLogicalProcessorInformation
    size = ctypes.c_uint32()
    ask(None, ctypes.byref(size))
    records = ctypes.create_string_buffer(size.value)  # of 32 bytes: a mask of 8, then 0 for a core
    return records.raw[8::32].count(0) if ask(records, ctypes.byref(size)) else 0


def machine() -> str:
    """This process's architecture by Linux' name. On Windows platform.machine() may name an emulator's."""
    return {"win-amd64": "x86_64", "win-arm64": "aarch64"}.get(sysconfig.get_platform()) or platform.machine()


@functools.cache
def sysctl(name: str) -> str:
    """What macOS reports under this name; '' if nothing, and on other systems."""
    if sys.platform != "darwin":
        return ""
    import subprocess

    command = ["/usr/sbin/sysctl", "-n", name]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def let_waiting_threads_sleep() -> None:
    """Make OpenMP's waiting threads sleep: spinning slows a busy core. Works only before torch's import."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _fields() -> dict[str, str]:
    """The fields of the first core in Linux's /proc/cpuinfo; on Windows four; none on other systems."""
    if words := re.match(r".* Family (\d+) Model (\d+) Stepping (\d+), (\w+)", IDENTIFIER):
        return dict(zip(("cpu family", "model", "stepping", "vendor_id"), words.groups()))
    try:
        lines = CPUINFO.read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {field.strip(): value.strip() for field, _, value in (line.partition(":") for line in lines)}


def _vendor_family_model() -> tuple[str, str, str] | None:
    """An x86 processor's vendor, family and model; None for others."""
    values = _fields()
    if not {"vendor_id", "cpu family", "model"} <= values.keys():
        return None
    return VENDORS.get(values["vendor_id"], values["vendor_id"]), values["cpu family"], values["model"]


def _fallback() -> str:
    """The architecture and, if the system reports it, the processor's name: 'arm64 Apple M1'."""
    if IDENTIFIER:
        return IDENTIFIER
    # platform.processor() is 'arm' for all of Apple's
    return f"{platform.machine()} {sysctl('machdep.cpu.brand_string') or platform.processor()}".strip()
