"""The just-in-time build under stress: kills, many processes, full disks, broken compilers, other users.

Most tests build sources of one line (small_build.py), in the same steps as the extension.
"""

import errno
import grp
import os
import pwd
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support import naming, or_skip, script, start_python

from robustness import small_build
from shakespeare.attention_ext import BuildError
from shakespeare.attention_ext.build import cache as cache_of_builds
from shakespeare.attention_ext.build import toolchain

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).with_name("small_build.py")
VERSION = 'case "$*" in *--version*) exit 0;; esac'
OTHER = 54321  # the number of a user who is neither this one nor root


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with or_skip():
        toolchain.find_compiler()


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
    )
    (folder / "other.cpp").write_text("int other = 1;\n")
    return folder


def finish(process) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


def small(cache, sources, *args, **env) -> tuple[int, str, str]:
    return finish(start_python(cache, SCRIPT, sources, *args, **env))


def libraries(cache):
    return [path.name for path in cache.glob("*/*.so")]


def test_a_build_killed_anywhere_is_taken_over(tmp_path, sources):
    """The process alone, or its compilers too."""
    start = time.monotonic()
    assert small(tmp_path / "whole", sources)[:2] == (0, "42\n")
    seconds = time.monotonic() - start
    for point in range(12):
        cache = tmp_path / str(point)
        process = start_python(cache, SCRIPT, sources)
        time.sleep(seconds * (point + 0.5) / 12)
        os.killpg(process.pid, signal.SIGKILL) if point % 2 else process.kill()
        process.communicate()
        assert small(cache, sources)[:2] == (0, "42\n"), point
        (folder,) = cache.glob("*decoder*")
        assert {path.name for path in folder.iterdir()} == {f"{folder.name[:-17]}.so", "building"}


def test_eight_processes_compile_once(tmp_path, sources):
    cache = tmp_path / "cache"
    results = [finish(p) for p in [start_python(cache, SCRIPT, sources) for _ in range(8)]]
    assert [(code, out) for code, out, _ in results] == [(0, "42\n")] * 8, results
    said = "".join(err for _, _, err in results).splitlines()
    assert said.count("Compiling the decoder...") == 1
    assert {*said} <= {"Compiling the decoder...", "Waiting for another build..."}
    assert len(libraries(cache)) == 1


def test_the_compilers_of_a_killed_build_are_waited_for(tmp_path, sources):
    """Their objects would take the place of newer ones."""
    cache, began, go = tmp_path / "cache", tmp_path / "began", tmp_path / "go"
    real = toolchain.find_compiler()[0]
    slow = f'case "$*" in *-c*) touch {began}; until [ -e {go} ]; do sleep 0.1; done;; esac; exec {real} "$@"'
    compiler = script(tmp_path / "slow", slow)
    first = start_python(cache, SCRIPT, sources, CXX=compiler)
    while not began.exists():
        assert first.poll() is None
        time.sleep(0.01)
    first.kill()
    first.communicate()
    second = start_python(cache, SCRIPT, sources, CXX=compiler)
    said = iter(second.stderr.readline, "")
    assert "Waiting for another build...\n" in said  # it ends where no process waits
    go.touch()
    assert finish(second)[:2] == (0, "42\n")


OLD = "cc1plus: error: unrecognized command line option '-std=c++17'"
FULL = "main.cpp:1: fatal error: error writing to x.s: No space left on device"
COMPILERS = {
    "too old": (f'{VERSION}\ncase "$*" in *-std=*) echo "{OLD}" >&2; exit 1;; esac', re.escape(OLD)),
    "on a full disk": (f'{VERSION}\necho "a.cpp:1:1: error: x\n{FULL}" >&2; exit 1', FULL),
    "crashing": (f"{VERSION}\nkill -SEGV $$", "Segmentation fault"),
    "silent": (f"{VERSION}\nexit 1", r"no reason given \(full output: .*build.log\)"),
    "in Latin 1": (f"{VERSION}\nprintf 'error: \\377 kaboom\\n' >&2; exit 1", "error: . kaboom"),
}


def test_a_compiler_that_cannot_do_it_is_one_line(tmp_path, sources, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    for kind, (text, reason) in COMPILERS.items():
        path = script(tmp_path / kind.replace(" ", "-"), text)
        monkeypatch.setenv("CXX", path)
        with naming(kind), pytest.raises(BuildError, match=f"{path} failed: .*{reason}") as caught:
            small_build.answer(sources)
        assert "\n" not in str(caught.value)
    assert libraries(tmp_path / "cache") == []


def write(work: Path) -> Path:
    (work / "made").touch()
    return work / "made"


def test_what_is_made_is_the_users_alone(tmp_path):
    target = tmp_path / "new" / "cache" / "build" / "made"
    mask = os.umask(0)
    try:
        cache_of_builds.make(target, "it", write)
    finally:
        os.umask(mask)
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in [*target.parents][:3])


def test_a_cache_that_cannot_be_written_is_read_and_a_build_in_it_is_one_line(monkeypatch, tmp_path):
    target = tmp_path / "cache" / "build" / "made"
    for number in (errno.EROFS, errno.ENOSPC, errno.EACCES):
        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", Mock(side_effect=OSError(number, os.strerror(number))))
            said = f"^cannot write the build directory {target.parent}: {os.strerror(number)}; TORCH_EXT"
            with pytest.raises(BuildError, match=said):
                cache_of_builds.make(target, "it", write)
    cache_of_builds.make(target, "it", write)
    monkeypatch.setattr(os, "mkdir", Mock(side_effect=OSError(errno.EROFS, "")))
    cache_of_builds.make(target, "it", write)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_directory_that_others_own_or_can_write_is_refused(monkeypatch, tmp_path, place):
    """One above the cache only if others could replace what is in it: there /tmp's sticky bit is accepted."""
    target = tmp_path / "above" / "cache" / "build" / "made"
    cache_of_builds.make(target, "it", write)
    directory = target.parents[place]
    (tmp_path / "link").symlink_to(directory)  # it is followed
    linked = tmp_path / "link" / target.relative_to(directory)

    def refused(why: str) -> None:
        for path in (target, linked):
            with pytest.raises(BuildError) as caught:
                cache_of_builds.make(path, "it", write)
            assert str(caught.value).startswith(f"{directory} {why}, so its files are not trusted; ")
            assert str(caught.value).endswith("; TORCH_EXTENSIONS_DIR can name another directory")

    monkeypatch.setattr(cache_of_builds, "is_private", lambda group: False)
    for mode in (0o777, 0o702):
        directory.chmod(mode)
        refused("can be written by everybody")
    directory.chmod(0o770)
    refused(f"can be written by group {directory.stat().st_gid}")
    monkeypatch.setattr(cache_of_builds, "is_private", lambda group: True)
    cache_of_builds.make(linked, "it", write)
    directory.chmod(0o1777)
    if place == 2:
        cache_of_builds.make(linked, "it", write)
    else:
        refused("can be written by everybody")
    directory.chmod(0o755)
    cache_of_builds.make(linked, "it", write)
    if os.geteuid() == 0:  # who can give a directory away
        os.chown(directory, OTHER, -1)
        refused(f"belongs to user {OTHER}")


def test_a_private_group_is_the_users_or_roots(monkeypatch):
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_name="will"))
    rows = [("root", []), ("will", []), ("will", ["will"]), ("will", ["will", "kit"]), ("men", [])]
    groups = {number: SimpleNamespace(gr_name=name, gr_mem=who) for number, (name, who) in enumerate(rows)}
    monkeypatch.setattr(grp, "getgrgid", groups.__getitem__)
    assert [group for group in range(6) if cache_of_builds.is_private(group)] == [0, 1, 2]  # 5 is no group
