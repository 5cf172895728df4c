"""The just-in-time build under stress: kills, many processes, full disks, broken compilers, other users.

Most tests build sources of one line (small_build.py), in the same steps as the extension.
"""

import dataclasses
import grp
import json
import os
import pwd
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import or_skip, script, start_python

from robustness import small_build
from shakespeare.attention_ext import BuildError, processor
from shakespeare.attention_ext.build import cache as cache_of_builds
from shakespeare.attention_ext.build import recipes, toolchain

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
    return small_build.write_sources(tmp_path / "sources")


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
    return sorted(path.name for path in cache.glob("*/*") if path.suffix == ".so")


def test_a_build_killed_anywhere_is_taken_over(full, tmp_path, sources):
    code, out, err = small(tmp_path / "caches", sources, "--kill", 100 if full else 25)
    assert code == 0, err
    done = json.loads(out)
    assert done["wrong"] == []
    # Every kill at a step takes place. A fast build can end before a point in time.
    assert done["points"] // 2 <= done["killed"] <= done["points"], done


def test_eight_processes_compile_once(tmp_path, sources):
    cache = tmp_path / "cache"
    results = [finish(p) for p in [start_python(cache, SCRIPT, sources) for _ in range(8)]]
    assert [(code, out) for code, out, _ in results] == [(0, "42\n")] * 8, results
    said = "".join(err for _, _, err in results).splitlines()
    assert said.count("Compiling the operators...") == 1
    assert {*said} <= {"Compiling the operators...", "Waiting for another build..."}
    assert libraries(cache) == ["attention_ext_portable.so"]


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
    message = "/attention_ext_portable_.*: Read-only file system; TORCH_EXTENSIONS_DIR can name another"
    assert re.search(message, error_of(finish(start_python(cache, SCRIPT, sources, prefix=prefix))))
    assert list(cache.iterdir()) == []
    assert small(cache, sources)[0] == 0
    assert finish(start_python(cache, SCRIPT, sources, prefix=prefix)) == (0, "42\n", "")


def test_a_full_disk_is_reported_and_leaves_nothing_harmful(full, tmp_path, sources, namespace):
    cache, ended = tmp_path / "cache", set()
    cache.mkdir()
    for pages in range(1, 17) if full else (1, 8):
        mounts = f"""mount -t tmpfs -o mode=700,size={pages * 4096} none {cache}
            if "$@"; then exit 42; fi
            ! find {cache} -name '*.so' | grep .
            mount -o remount,size=16m {cache}"""  # make room; the second attempt follows
        code, out, err = finish(start_python(cache, SCRIPT, sources, prefix=namespace(mounts)))
        if code == 42:
            assert out == "42\n"
            ended.add("room enough")
            continue
        first = [line for line in err.splitlines() if not line.startswith("Compiling ")]
        assert (code, out, len(first)) == (0, "42\n", 1), err
        assert first[0].startswith("Error: ") and "no space left on device" in first[0].lower()
        ended.add("reported")
    assert "reported" in ended


OLD = "cc1plus: error: unrecognized command line option '-std=c++17'"
COMPILERS = {
    "too old": (f'{VERSION}\ncase "$*" in *-std=*) echo "{OLD}" >&2; exit 1;; esac', re.escape(OLD)),
    "crashing": (f"{VERSION}\nkill -SEGV $$", "failed: error: ended by a signal: Segmentation fault"),
    "silent": (f"{VERSION}\nexit 1", r"failed: no reason given \(full output: .*build.log\)"),
    "wrong": (
        f'{VERSION}\nwhile [ $# -gt 0 ]; do [ "$1" != -o ] || echo junk > "$2"; shift; done',
        r"made a library that cannot be loaded \(.*: file too short\)",
    ),
    "in Latin 1": (f"{VERSION}\nprintf 'error: \\377 kaboom\\n' >&2; exit 1", "failed: error: . kaboom"),
}


def test_a_compiler_that_cannot_do_it_is_one_line(tmp_path, sources):
    for kind, (text, reason) in COMPILERS.items():
        path = script(tmp_path / kind.replace(" ", "-"), text)
        said = error_of(small(tmp_path / "cache", sources, CXX=path))
        assert said.startswith((f"Error: {path} ", f"Error: the compiler {path} ")), (kind, said)
        assert re.search(reason, said), (kind, said)
    assert libraries(tmp_path / "cache") == []


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Build a program of one line in this process; return its path, and whether it was compiled."""
    directory = tmp_path / "sources"
    directory.mkdir()
    for name, text in {"main.cpp": "int main() { return 42; }\n", "other.cpp": "", "a.h": ""}.items():
        (directory / name).write_text(text)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "new" / "cache"))

    def make():
        capsys.readouterr()
        sources = (directory / "main.cpp", directory / "other.cpp")
        recipe = dataclasses.replace(recipes.program("portable"), folders=(directory,), sources=sources)
        made = recipe.make()
        assert subprocess.run([made]).returncode == 42
        return made, "Compiling" in capsys.readouterr().err

    return make


CHANGES = {
    "flag": lambda patch, csrc: patch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-g0")),
    "CPU": lambda patch, csrc: patch.setattr(processor, "capabilities", lambda: "another CPU"),
    "header": lambda patch, csrc: (csrc / "a.h").write_text("// changed\n"),
    "source": lambda patch, csrc: (csrc / "main.cpp").write_text("int main() { return 6 * 7; }\n"),
    "new source": lambda patch, csrc: (csrc / "b.h").write_text(""),
    "compiler": lambda patch, csrc: patch.setenv("CXX", f"{toolchain.find_compiler()[0]} -O1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_compiles_anew_and_its_absence_does_not(program, change, tmp_path):
    before, compiled = program()
    assert compiled and program() == (before, False)
    kept = before.stat()
    csrc = tmp_path / "sources"
    files = {path: path.read_text() for path in csrc.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        CHANGES[change](patch, csrc)
        after, compiled = program()
        assert compiled and after != before
        assert program() == (after, False)
    for path in csrc.iterdir():
        path.write_text(files[path]) if path in files else path.unlink()
    assert program() == (before, False)  # the first build is still there, untouched
    assert before.stat().st_mtime_ns == kept.st_mtime_ns and before.stat().st_ino == kept.st_ino


def test_what_is_made_is_the_users_alone(program, tmp_path):
    mask = os.umask(0)
    try:
        made, _ = program()
    finally:
        os.umask(mask)
    for directory in (tmp_path / "new", tmp_path / "new" / "cache", made.parent):
        assert directory.stat().st_mode & 0o777 == 0o700


def refusal(program) -> str:
    with pytest.raises(BuildError) as caught:
        program()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("place", ["above", "cache", "build", "link"])
def test_a_directory_that_others_own_or_can_write_is_refused(program, monkeypatch, tmp_path, place):
    """One above the cache only if others could replace what is in it: there /tmp's sticky bit is accepted."""
    made, _ = program()
    directory = {"above": tmp_path / "new", "build": made.parent}.get(place, made.parent.parent)
    if place == "link":  # it is followed
        (tmp_path / "link").symlink_to(directory)
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "link"))
    group, so = f"group {directory.stat().st_gid}", "so its files are not trusted; "
    own = f"export TORCH_EXTENSIONS_DIR={tmp_path / 'home' / 'torch_extensions'}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache_of_builds, "is_private", lambda group: False)
    for mode in (0o777, 0o702, 0o770):
        directory.chmod(mode)
        who = group if mode == 0o770 else "everybody"
        said = f"{directory} can be written by {who}, {so}chmod go-w {directory}, or {own}"
        assert refusal(program) == said
    monkeypatch.setattr(cache_of_builds, "is_private", lambda group: True)
    assert program() == (made, False)
    directory.chmod(0o1777)
    if place == "above":
        assert program() == (made, False)
    else:
        assert refusal(program).endswith(
            f"export TORCH_EXTENSIONS_DIR={directory}/torch_extensions_{os.geteuid()}"
        )
    directory.chmod(0o755)
    assert program() == (made, False)
    if os.geteuid() == 0:  # who can give a directory away
        os.chown(directory, OTHER, -1)
        assert refusal(program) == f"{directory} belongs to user {OTHER}, {so}{own}"


def test_a_library_that_another_could_have_planted_is_not_run(tmp_path, sources):
    cache = tmp_path / "cache"
    assert small(cache, sources)[:2] == (0, "42\n")
    (library,) = cache.glob("*/*.so")
    ran = tmp_path / "ran"
    planted = tmp_path / "planted.cpp"
    planted.write_text(
        f'#include <cstdio>\nstruct Ran {{ Ran() {{ std::fclose(std::fopen("{ran}", "w")); }} }} ran;\n'
        + small_build.ANSWER
    )
    subprocess.run([*toolchain.find_compiler(), "-shared", "-fPIC", planted, "-o", library], check=True)
    library.parent.chmod(0o777)
    assert "can be written by everybody" in error_of(small(cache, sources))
    assert not ran.exists()
    library.parent.chmod(0o700)  # now it runs, so this test can fail
    assert small(cache, sources) == (0, "42\n", "") and ran.exists()


def test_a_private_group_is_the_users_or_roots(monkeypatch):
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_name="will"))
    rows = [("root", []), ("will", []), ("will", ["will"]), ("will", ["will", "kit"]), ("men", [])]
    groups = {number: SimpleNamespace(gr_name=name, gr_mem=who) for number, (name, who) in enumerate(rows)}
    monkeypatch.setattr(grp, "getgrgid", groups.__getitem__)
    assert [group for group in range(6) if cache_of_builds.is_private(group)] == [0, 1, 2]  # 5 is no group
