"""The processor's name, features and cores, on x86, on ARM and on macOS, and its name in files."""

import functools
import os

import pytest

from shakespeare.attention_ext import processor

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC
stepping\t: 1
cpu MHz\t\t: 2600.000
flags\t\t: fpu sse2 avx2

processor\t: 1
vendor_id\t: AnotherOne
"""
ARM = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""
SAID = {
    X86: "AMD EPYC, family 26, model 2; vendor_id: AuthenticAMD; cpu family: 26; model: 2; stepping: 1; "
    "flags: fpu sse2 avx2",
    ARM: "ARM implementer 0x41, part 0xd0c; Features: fp asimd asimddp; CPU implementer: 0x41; "
    "CPU variant: 0x3; CPU part: 0xd0c",
}
FIELDS = "processor : 0\nvendor_id : {}\ncpu family : {}\nmodel : {}\nmodel name : {}\n\nprocessor : 1\n"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Forget this machine's processor, and the test's afterwards."""
    caches = processor.name.cache_clear, processor.sysctl.cache_clear
    yield [clear() for clear in caches]
    [clear() for clear in caches]


@pytest.fixture
def cpuinfo(monkeypatch, tmp_path):
    """Return a function that gives this machine another /proc/cpuinfo."""
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    return processor.CPUINFO.write_text


@pytest.mark.parametrize("text", SAID)
def test_a_processor_as_linux_describes_it(cpuinfo, text):
    cpuinfo(text)
    assert [processor.name(), *processor.capabilities().splitlines()] == SAID[text].split("; ")


def test_cores_are_those_of_the_process_and_of_its_share_of_time(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(processor, "QUOTA", tmp_path / "cpu.max")
    assert processor.cores() == 8
    limits = {"max 100000": 8, "200000 100000": 2, "150000 100000": 2, "10000 100000": 1, "1600000 100000": 8}
    for limit, cores in limits.items():
        processor.QUOTA.write_text(f"{limit}\n")
        assert processor.cores() == cores, limit


def test_the_design_and_the_slug(cpuinfo):
    """A cloud may hide the model's name, so vendor, family and model decide."""
    for vendor, family, model, design, slug in (
        ("AuthenticAMD", 25, 17, "AMD Zen 4", "amd-zen-4"),
        ("AuthenticAMD", 26, 2, "AMD Zen 5", "amd-zen-5"),
        ("AuthenticAMD", 26, 0x50, None, "amd-26-80"),
        ("GenuineIntel", 6, 143, "Intel Sapphire Rapids", "intel-sapphire-rapids"),
        ("GenuineIntel", 6, 85, None, "intel-6-85"),
        ("HygonGenuine", 24, 1, None, "hygongenuine-24-1"),
        ("../.. /x", 6, "?", None, "x-6"),
    ):
        cpuinfo(FIELDS.format(vendor, family, model, "a cloud's"))
        processor.name.cache_clear()
        assert (processor.microarchitecture(), processor.slug()) == (design, slug)
        assert processor.name() == f"a cloud's, family {family}, model {model}"


def test_the_caches_are_listed_the_smallest_first():
    sizes = [cache.size for cache in processor.caches()]
    assert sizes == sorted(sizes) and len(sizes) >= 2


APPLE_M1 = (  # whose slow cores have other caches
    "hw.cachelinesize=128 hw.l1dcachesize=65536 hw.l2cachesize=4194304 "
    "hw.perflevel0.l1dcachesize=131072 hw.perflevel0.l2cachesize=12582912"
)
INTEL = "hw.cachelinesize=64 hw.l1dcachesize=32768 hw.l2cachesize=262144"


def test_the_caches_of_a_mac(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "CACHES", tmp_path)
    for reported, expected in (
        (APPLE_M1, (processor.Cache(1, 131072, 8, 128), processor.Cache(2, 12582912, 16, 128))),
        (INTEL, (processor.Cache(1, 32768, 8, 64), processor.Cache(2, 262144, 16, 64))),
        ("", processor.ASSUMED),
    ):
        values = dict(each.split("=") for each in reported.split())
        monkeypatch.setattr(processor, "sysctl", functools.cache(lambda name, of=values: of.get(name, "")))
        assert processor.caches() == expected
