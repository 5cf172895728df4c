"""Which of a wheel's libraries is loaded."""

import hashlib

import pytest

from shakespeare.attention_ext import BuildError, extension, processor
from shakespeare.attention_ext.build import prebuilt
from shakespeare.generation.engines import native


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """A wheel with libraries for x86-64, but not for AVX-512 without VNNI, and for ARM."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(processor, "machine", lambda: "x86_64")
    monkeypatch.setattr(prebuilt.sys, "platform", "linux")
    monkeypatch.delenv(prebuilt.COMPILE, raising=False)
    for level in ("x86_64", "x86_64_v3", "x86_64_v4+avx512vnni", *prebuilt.LEVELS["aarch64"]):
        (tmp_path / f"decoder-{level}.so").touch()


def test_the_best_library_that_the_processor_can_run_is_taken(wheel, monkeypatch):
    v3, v4 = processor.AVX2, processor.AVX512
    for machine, features, level in (
        ("x86_64", set(), "x86_64"),
        ("x86_64", v3 - {"fma"}, "x86_64"),
        ("x86_64", v3 | {"sse4_2"}, "x86_64_v3"),
        ("x86_64", v4, "x86_64_v3"),  # its own is missing
        ("x86_64", v4 | {"avx512_vnni"}, "x86_64_v4+avx512vnni"),
        ("aarch64", {"asimd"}, "generic"),
        ("aarch64", {"asimd", "asimddp"}, "generic+dotprod"),
        ("riscv64", set(), "this processor"),
    ):
        monkeypatch.setattr(processor, "machine", lambda: machine)
        monkeypatch.setattr(processor, "features", lambda: features)
        assert prebuilt.level("decoder") == level


def test_nothing_is_taken_where_it_is_to_be_compiled(wheel, monkeypatch, tmp_path):
    assert prebuilt.find("decoder") is not None and prebuilt.find("operators") is None
    monkeypatch.setenv(prebuilt.COMPILE, "1")
    assert prebuilt.level("decoder") == "this processor"
    monkeypatch.delenv(prebuilt.COMPILE)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "none")
    assert prebuilt.find("decoder") is None


def test_a_library_that_cannot_be_loaded_is_a_sentence(wheel, monkeypatch, tmp_path):
    """A missing one, a truncated one, and one that this system's libc does not take."""
    monkeypatch.setattr(processor, "features", set)
    library = tmp_path / "decoder-x86_64.so"
    digest = hashlib.sha256(b"another system's").hexdigest()
    (tmp_path / prebuilt.SUMS).write_text(f"{digest}  {library.name}\n")
    for content, why in (
        (b"another", f"is not the file that {prebuilt.SUMS} beside it names"),
        (b"another system's", r"cannot be loaded \("),
        (None, "has no decoder for this processor, x86_64"),
    ):
        library.unlink() if content is None else library.write_bytes(content)
        with pytest.raises(BuildError, match=f"{why}.*; {prebuilt.REMEDY}"):
            extension.load_library("decoder", native.recipe)
