"""The just-in-time build under stress: kills, many processes, full disks, broken compilers, other users.

Most tests build sources of one line (small_build.py), in the same steps as the extension.
"""

import grp
import os
import pwd
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import or_skip, script, start_python

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


def error_of(result) -> str:
    """The one line of error of a process; lines that report compiling are left out."""
    code, out, err = result
    lines = [line for line in err.splitlines() if not line.startswith("Compiling ")]
    assert code == 2 and out == "" and len(lines) == 1, err
    assert lines[0].startswith("Error: ")
    return lines[0]


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


@pytest.fixture(scope="module")
def namespace(tmp_path_factory):
    """Make a command's prefix that first mounts something, in a namespace that ends with the command."""
    trial = tmp_path_factory.mktemp("mount")

    def prefix(mounts: str) -> list[str]:
        return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", f'{mounts}; exec "$@"', "sh"]

    try:
        subprocess.run([*prefix(f"mount -t tmpfs none {trial}"), "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    return prefix


def test_a_read_only_cache_is_read_and_a_build_in_it_is_an_error(tmp_path, sources, namespace):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    prefix = namespace(f"mount --bind {cache} {cache}; mount -o remount,bind,ro {cache}")
    message = (
        "/attention_ext_decoder_portable_.*: Read-only file system; TORCH_EXTENSIONS_DIR can name another"
    )
    assert re.search(message, error_of(finish(start_python(cache, SCRIPT, sources, prefix=prefix))))
    assert list(cache.iterdir()) == []
    assert small(cache, sources)[0] == 0
    assert finish(start_python(cache, SCRIPT, sources, prefix=prefix)) == (0, "42\n", "")


def test_a_full_disk_is_reported_and_leaves_nothing_harmful(tmp_path, sources, namespace):
    cache = tmp_path / "cache"
    cache.mkdir()
    for pages in (1, 8):
        mounts = f"""mount -t tmpfs -o mode=700,size={pages * 4096} none {cache}
            ! "$@"
            ! find {cache} -name '*.so' | grep .
            mount -o remount,size=16m {cache}"""  # make room; the second attempt follows
        code, out, err = finish(start_python(cache, SCRIPT, sources, prefix=namespace(mounts)))
        first = [line for line in err.splitlines() if not line.startswith("Compiling ")]
        assert (code, out, len(first)) == (0, "42\n", 1), err
        assert first[0].startswith("Error: ") and "no space left on device" in first[0].lower()


OLD = "cc1plus: error: unrecognized command line option '-std=c++17'"
COMPILERS = {
    "too old": (f'{VERSION}\ncase "$*" in *-std=*) echo "{OLD}" >&2; exit 1;; esac', re.escape(OLD)),
    "crashing": (f"{VERSION}\nkill -SEGV $$", "failed: .*Segmentation fault"),
    "silent": (f"{VERSION}\nexit 1", r"failed: no reason given \(full output: .*build.log\)"),
    "in Latin 1": (f"{VERSION}\nprintf 'error: \\377 kaboom\\n' >&2; exit 1", "failed: error: . kaboom"),
}


def test_a_compiler_that_cannot_do_it_is_one_line(tmp_path, sources):
    for kind, (text, reason) in COMPILERS.items():
        path = script(tmp_path / kind.replace(" ", "-"), text)
        said = error_of(small(tmp_path / "cache", sources, CXX=path))
        assert said.startswith((f"Error: {path} ", f"Error: the compiler {path} ")), (kind, said)
        assert re.search(reason, said), (kind, said)
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
