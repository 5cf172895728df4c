"""attention_ext/processor.py: what it reads from the system, and the processor's name in files."""

from __future__ import annotations

import os

import pytest

from attention_ext import processor

X86 = "processor : 0\nvendor_id : {}\ncpu family : {}\nmodel : {}\nmodel name : {}\n\nprocessor : 1\n"
ARM = "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40\n"


@pytest.mark.parametrize(
    "limit, expected",
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("1600000 100000", 8),
        (None, 8),
    ],
)
def test_cores_are_those_of_the_process_and_of_its_share_of_time(monkeypatch, tmp_path, limit, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(processor, "QUOTA", tmp_path / "cpu.max")
    if limit:
        processor.QUOTA.write_text(f"{limit}\n")
    assert processor.cores() == expected


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    """Let the system describe another processor; None: it describes none."""
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    processor.name.cache_clear()

    def describe(text: str | None) -> None:
        if text is not None:
            processor.CPUINFO.write_text(text)

    yield describe
    processor.name.cache_clear()


@pytest.mark.parametrize(
    "vendor, family, model, design, slug",
    [
        ("AuthenticAMD", 25, 1, "AMD Zen 3", "amd-zen-3"),
        ("AuthenticAMD", 25, 17, "AMD Zen 4", "amd-zen-4"),
        ("AuthenticAMD", 25, 0x61, "AMD Zen 4", "amd-zen-4"),
        ("AuthenticAMD", 26, 2, "AMD Zen 5", "amd-zen-5"),
        ("AuthenticAMD", 26, 0x50, None, "amd-26-80"),
        ("AuthenticAMD", 23, 49, None, "amd-23-49"),
        ("GenuineIntel", 6, 106, "Intel Ice Lake", "intel-ice-lake"),
        ("GenuineIntel", 6, 143, "Intel Sapphire Rapids", "intel-sapphire-rapids"),
        ("GenuineIntel", 6, 207, "Intel Emerald Rapids", "intel-emerald-rapids"),
        ("GenuineIntel", 6, 173, "Intel Granite Rapids", "intel-granite-rapids"),
        ("GenuineIntel", 6, 85, None, "intel-6-85"),
        ("HygonGenuine", 24, 1, None, "hygongenuine-24-1"),
        ("../.. /x", 6, "?", None, "x-6"),
    ],
)
def test_the_design_and_the_slug(cpuinfo, vendor, family, model, design, slug):
    """A cloud may hide the model's name, so vendor, family and model decide."""
    cpuinfo(X86.format(vendor, family, model, "a cloud's"))
    assert (processor.microarchitecture(), processor.slug()) == (design, slug)
    assert processor.name() == f"a cloud's, family {family}, model {model}"


@pytest.mark.parametrize(
    "text, system, slug",
    [
        (ARM, ("aarch64", ""), "arm-implementer-0x41-part-0xd40"),
        (None, ("arm64", "arm"), "arm64-arm"),
        (None, ("", ""), "unknown"),
    ],
)
def test_other_processors_have_a_slug_too(cpuinfo, monkeypatch, text, system, slug):
    monkeypatch.setattr(processor.platform, "machine", lambda: system[0])
    monkeypatch.setattr(processor.platform, "processor", lambda: system[1])
    cpuinfo(text)
    assert (processor.microarchitecture(), processor.slug()) == (None, slug)
