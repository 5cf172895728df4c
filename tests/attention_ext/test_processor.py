"""The processor's name, features, cores and caches, as Linux reports them, and its name in files."""

import os

import pytest

from shakespeare.attention_ext import BuildError, processor
from shakespeare.attention_ext.build import toolchain

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
    processor.name.cache_clear()
    yield
    processor.name.cache_clear()


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
    """The least limit of all control groups counts, in both versions, and MAX_JOBS limits compilers only."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(processor, "GROUPS", tmp_path)
    monkeypatch.setattr(processor, "GROUPS_OF_PROCESS", tmp_path / "groups")
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert processor.cores() == 8
    (tmp_path / "groups").write_text("3:cpuset:/a\n2:cpu,cpuacct:/a\n0::/job/b:c\n")
    for folder in ("job/b:c", "cpu/a", "cpuset/a"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "cpuset" / "a" / "cpu.max").write_text("100000 100000")
    (tmp_path / "cpu" / "a" / "cpu.cfs_period_us").write_text("50000\n")
    v1 = "cpu/a/cpu.cfs_quota_us"
    for file, limit, cores in (
        ("job/b:c/cpu.max", "max 100000", 8),
        (v1, "-1", 8),
        (v1, "350000", 7),
        ("cpu.max", "600000 100000", 6),
        ("job/cpu.max", "450000 100000", 5),
        ("job/b:c/cpu.max", "1600000 100000", 5),
        ("job/b:c/cpu.max", "10000 100000", 1),
        ("job/b:c/cpu.max", "150000 100000", 2),
    ):
        (tmp_path / file).write_text(f"{limit}\n")
        assert processor.cores() == toolchain.jobs() == cores, (file, limit)
    monkeypatch.setenv("MAX_JOBS", "3")
    assert (processor.cores(), toolchain.jobs()) == (2, 3)
    for wrong in ("0", "two", "-1", "9" * 9):
        monkeypatch.setenv("MAX_JOBS", wrong)
        with pytest.raises(BuildError, match=f"MAX_JOBS is '{wrong}'; it must be a number"):
            toolchain.jobs()


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
