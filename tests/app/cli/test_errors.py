"""Errors are one line on stderr and exit code 2. Ctrl-C and a closed pipe end the program quietly."""

import json
import logging
import os
import re
import signal
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support import ROOT, printed

from shakespeare.attention_ext import PARTS, processor
from shakespeare.attention_ext.build import nvrtc

WRONG = [
    (["part9"], "No such command 'part9'"),
    (["part4", "--prompt", "To be"], "--prompt goes with --inference only"),
    (["part4", "--inference", "--causal"], "--causal does not go with --inference"),
    (["part4", "-N", "10000000"], "N is 10000000; the reference would need"),
    (["part4", "--device", "webgpu", "--kernel", "7"], "not one of '1', '2', '3', '4', '5', '6'."),
    (["part4", "--device", "cuda", "-br", "64"], "br is 64; it must be left out on CUDA"),
    (["part1", "--device", "cuda"], "part is 'part1'; it must be part0 or part4 on CUDA"),
    (["bulk", "--texts", "1", "--out", ""], "'--out': '' is no directory"),
    (
        ["part4", "--device", "webgpu", "--window", "5"],
        "window is given; it must be left out with part4 on WebGPU",
    ),
    (["explain", "part4", "--alibi", "--cachegrind"], "--cachegrind does not go with rules"),
    (["explain", "part4", "--dtype", "bf16", "--cachegrind"], "--cachegrind goes with --dtype fp32; bf16"),
    (["bench", "part0", "--device", "webgpu"], "contender is 'part0'; on WebGPU it must be one of part4"),
    (["serve", "--device", "cuda", "--threads", "2"], "--threads does not go with --device cuda"),
    (["part0", "--inference", "-m", "shakes512"], "model 'shakes512' was not found"),
    (["part0", "--inference", "--prompt", "naïve 日本"], "not know 3 of the text's characters: 'ï' '日'"),
    (["part0", "--inference", "--prompt-file", "nowhere.txt"], "nowhere.txt: No such file"),
    (["part0", "--inference", "--prompt", "a", "--prompt-file", "b"], "exclude each other"),
    (["part0", "--inference", "--seed", str(2**63 - 1)], "seed is 9223372036854775807; the last sample's"),
    (["part0", "--inference", "--engine", "native"], "engine is 'native'; it must be 'torch' with part0"),
    (["export", "-m", "a", "--to", "hf", "--out", "b", "--type", "f16"], "--type goes with --to gguf only"),
    (["train", "a/b", "--corpus", __file__], "NAME is 'a/b'; it must be letters, digits"),
    (["train", "shakes128", "--minutes", "3"], "--minutes does not go with shakes128"),
    (["train", "mine", "--resume", "--corpus", __file__, "--part", "part0"], "out/mine holds no run"),
    (
        ["train", "mine", "--init", "shakes128", "--block-size", "256", "--corpus", __file__],
        "block_size is 256; it must be at most 128, that of the model",
    ),
    (["train", "mine", "--dtype", "bf16"], "--dtype bf16 goes with --device cuda only"),
    (["part1", "--backward"], "part is 'part1'; it must be part0 or part4 for gradients in fp32 on the CPU"),
    (["--prompt", r"ROMEO:\nO"], r"characters: '\\'; in a shell $'\n' is a line end"),
    (["race", "part3,part4", "--prompt", "FILE:日 1"], "; --prompt-file '日 1' continues a file"),
    (["race", "part0,part9"], "'part9' must be one of part0, part1"),
    (["race", "part0,part0"], "parts is 'part0,part0'; it must name two or more, each once"),
    (["race", ""], "parts is ''; it must name two or more, each once"),
    (["bench", "-N", "1:5000"], "more than 1000 numbers"),
    (["bench", "none.cpp"], "part is 'none.cpp'; there is no such file"),
    (["bench", "-br", "x"], "a range like 256:4096*2 or 1:9+2 or auto"),
    (["bench", "--rules", "window"], "rule is 'window'; it must be none, window=KEYS, softcap=BOUND"),
    (["bench", "--rules", "alibi", "--queries", "1"], "rule is 'alibi'; it must be none but on the CPU"),
    (["bench", "--show"], "--show goes with --tune only"),
    (["bench", "part1,sdpa", "-br", "64"], "-br and -bc go with part4 only"),
    (["bench", "sdpa", "--dry-run", "--save", "x.json"], "--save does not go with --dry-run"),
    (["bench", "--device", "cuda", "-br", "64"], "-br does not go with --device cuda"),
    (["bench", "--device", "cuda", "--load", __file__], "--device does not go with --load"),
    (["bench", "--save", "part0,sdpa"], "--save is 'part0,sdpa'; it must be a file; CONTENDERS come before"),
    (["part4", "--n_layer", "4"], "'--n_layer', which is nanoGPT's; here: a number, an option of train"),
    (["train", "mine", "--max_iters=5"], "here: --minutes or --steps of train"),
    (["--compile=False"], "'--compile', which is nanoGPT's; here: leave it out"),
    (["sample.py", "--out_dir=x"], "No such command 'sample.py', which is nanoGPT's; here: part4"),
    (["-start", "A"], "No such option '--start', which is nanoGPT's; here: --prompt TEXT"),
    (["config/x.py"], "nanoGPT's; here: options of train, config files are not read"),
    (["-top_k=-2"], "'--top-k': -2 is not in the range"),
    (["train", "mine", "--rates=steps=3"], "--rates is 'steps=3'; it must be NAME=NUMBER,... with names of"),
]


def test_an_error_is_one_line(extension, failed):
    for arguments, message in WRONG:
        assert message in failed(*arguments)


def test_a_file_that_is_no_text_is_named(failed, tmp_path):
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    for arguments in (["eval", "--corpus", "binary"], ["part0", "--inference", "--prompt-file", "binary"]):
        assert "binary is not UTF-8 at byte 3" in failed(*arguments)
    message = failed("part0", "--inference", "--prompt-file", "-", input=b"\xff")
    assert "standard input is not UTF-8 at byte 0" in message
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "input.txt").write_text("a text")
    ids = np.arange(1, 50, dtype=np.uint16)
    hint, train = "did you mean data/input.txt?", ("train", "own", "--corpus")
    others = ("eval", "--corpus"), ("draft", "-m", "shakes128", "--corpus"), ("prepare", "--corpus")
    for content, said in (
        ("a text".encode("utf-16"), "is UTF-16, which Windows calls Unicode; it must be text in UTF-8"),
        ("a text".encode("utf-16-be"), "holds a NUL, character 0: it is binary, as nanoGPT's train.bin, or"),
        (ids.tobytes(), "holds a NUL, character 1"),
        ((ids + 50000).tobytes(), "is not UTF-8 at byte 1"),
        (b"", "data/train.bin is empty; it must be a file of text"),
        (None, "data is a folder; it must be a file of text"),
    ):
        name = "data" if content is None else "data/train.bin"
        if content is not None:
            (tmp_path / name).write_bytes(content)
        for arguments in (train, (*train[:2], "--init", "shakes128", "--corpus"), *others):
            message = failed(*arguments, name)
            assert said in message and hint in message, (arguments, message)
    (folder / "train.bin").write_bytes("a text".encode("utf-16"))
    for arguments in (("part0", "--inference", "--prompt-file"), ("bulk", "--out", "out", "--prompts")):
        assert "data/train.bin is UTF-16" in failed(*arguments, "data/train.bin")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("part", ["part0", "part4"])
def test_without_a_gpu(failed, part):
    assert "device is 'cuda', and" in failed(part, "--device", "cuda")


def test_too_little_memory_is_one_line(failed, monkeypatch):
    def bad_alloc(*_):
        raise MemoryError("std::bad_alloc")

    for allocate, reason in (
        (lambda *_: np.empty(2**59), "Unable to allocate 4.00 EiB"),
        (lambda *_: torch.empty(2**59), ".*can't allocate memory: you tried to allocate"),
        (bad_alloc, "std::bad_alloc"),
    ):
        monkeypatch.setattr("shakespeare.model.corpus.read", allocate)
        assert re.match(f"gpt.py: error: memory does not suffice: {reason}", failed("eval", "--corpus", "a"))


def test_without_nvrtc(failed, monkeypatch):
    """As on a machine with a GPU and without cuda-core."""
    missing = Mock(side_effect=nvrtc.missing("cuda.core is missing"))
    monkeypatch.setattr("shakespeare.lab.cuda.device.Gpu", missing)
    assert "pip install cuda-core" in failed("part4", "--device", "cuda")


EVERY_PART = """
import contextlib, io, json
from shakespeare.app.cli import main
from shakespeare.attention_ext import PARTS, processor

done = []
for part in PARTS:
    for arguments in (["-N", "16"], ["--inference", "--max-new-tokens", "3"]):
        code = 0
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                main([part, *arguments])
            except SystemExit as end:
                code = end.code
        done.append([part, code, errors.getvalue()])
print(json.dumps(done))
"""


def test_without_a_compiler_part0_works_and_the_others_say_what_to_install(tmp_path):
    """In a process with nothing on PATH and an empty build cache."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'ziglang' else find(name, *a)\n"
    )
    here = str(tmp_path)
    bare = dict(PATH=here, CXX="", TORCH_EXTENSIONS_DIR=here, PYTHONPATH=f"{here}{os.pathsep}{ROOT}")
    ran = printed(sys.executable, "-c", EVERY_PART, cwd=tmp_path, **bare)
    for part, code, errors in json.loads(ran):
        if PARTS[part].operator:
            assert code == 2 and errors.count("\n") == 1
            assert errors.startswith("gpt.py: error: parts 1 to 4 need a C++ compiler")
            assert "apt install g++" in errors
        else:
            assert code == 0, errors


ENDLESS = ("part0", "--inference", "-m", "shakes2048", "--max-new-tokens", 1_000_000)


def test_what_the_library_logs_is_shown_once(cli, caplog, monkeypatch):
    def log(echo):
        library = logging.getLogger("shakespeare.attention_ext")
        library.warning("Compiling %s...", "a kernel")
        library.error("rank 1 did not\nanswer")

    monkeypatch.setattr("shakespeare.lab.doctor.run", log)
    assert cli("doctor").stderr == "Compiling a kernel...\ngpt.py: error: rank 1 did not\\nanswer\n"
    assert not caplog.records  # of the root logger's handlers


def test_more_threads_than_cores_are_warned_of_in_one_line(cli):
    most = processor.cores()
    sizes = ["part0", "-N", 8]
    done = cli(*sizes, "--threads", most + 1)
    line = f"gpt.py: warning: --threads is {most + 1}; this process may use {most} cores"
    assert done.stderr.splitlines().count(line) == 1
    assert "warning" not in cli(*sizes, "--threads", most).stderr + cli(*sizes).stderr


def test_text_is_flushed_as_it_is_made_and_ctrl_c_keeps_it(process):
    running = process(*ENDLESS, "--prompt", "ROMEO:")
    start = os.read(running.stdout.fileno(), 100)  # it is still writing
    running.send_signal(signal.SIGINT)
    rest, errors = running.communicate()
    assert start.startswith(b"ROMEO:"[: len(start)])
    assert running.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.full
def test_a_closed_pipe_ends_it_quietly(process):
    running = process(*ENDLESS)
    os.read(running.stdout.fileno(), 10)
    running.stdout.close()
    assert running.wait() == 0
    errors = running.stderr.read()
    assert "Traceback" not in errors and "Broken" not in errors and "Exception" not in errors
