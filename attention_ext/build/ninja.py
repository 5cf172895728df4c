"""Compiles by ninja: what a change concerns and no more, each object once for all libraries that link it.

A folder of objects belongs to a compiler, a processor and a checkout. The compiler's dependency files tell
what an object was made from. Compilers inherit the folder's lock: a killed build's are waited for.
"""

import functools
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shakespeare.attention_ext.build import cache, toolchain
from shakespeare.attention_ext.parts import BuildError

NO_NINJA = "parts 1 to 4 are compiled by ninja, and none was found: pip install ninja"
MARK = "\x1e"  # before the target of a command that failed, before and behind what it wrote
RULE = r"""
rule run
  description = $out
  command = said=$$(exec 2>&1; $words -o $out.new || exit) && mv -f $out.new $out || $
    { printf '\036%s\036%s\n\036\n' $out "$$said"; exit 1; }
"""
# Signs of the line that says why a compiler failed, the most reliable first; the shell reports a crash.
REASONS = "no space left on device|undefined reference|error:|segmentation fault|killed|aborted|fatal:"


@dataclass(frozen=True)
class Object:
    """An object file. tool: the compiler and its first words. facts: what else decides the content."""

    source: Path
    tool: tuple[str, ...]
    flags: tuple[str, ...]
    facts: tuple[str, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        """Its path in a folder of objects."""
        named = cache.fingerprint((*self.tool, *self.flags, *self.facts, str(self.source.parent)))
        return f"{named}/{self.source.stem}.o"

    def command(self) -> list[str]:
        """The command that compiles it, without the object."""
        dependencies = ("-M", "-MT") if self.source.suffix == ".ispc" else ("-c", "-MMD", "-MQ")
        return [*self.tool, *self.flags, str(self.source), *dependencies, self.name, "-MF", f"{self.name}.d"]


def find() -> list[str]:
    """ninja's command: the package's, else that on PATH. Raises BuildError if there is none."""
    for folder in (sysconfig.get_path("scripts"), None):
        path = shutil.which("ninja", path=folder)
        if path:
            return [path]
    if importlib.util.find_spec("ninja"):
        return [sys.executable, "-m", "ninja"]
    raise BuildError(NO_NINJA)


def build(
    folder: Path, objects: Sequence[Object], linker: Sequence[str], link: Sequence[str], target: Path
) -> None:
    """Compile the objects that a change concerns, the last saved sources first, and link `target`.

    folder: holds the objects. linker, link: its command, and its arguments after the objects. The output of a
    failure stays in build.log beside the folder of `target`.
    Raises BuildError, with the compiler's `output`; OSError if folder cannot be written.
    """
    jobs = toolchain.jobs()
    cache.create(folder)
    with cache.locked(folder / cache.LOCK) as lock:
        names = [item.name for item in objects]
        statements = [_statement(str(target), names, [*linker, *names, *link])]
        tools = {str(target): linker}
        # The files of a new checkout have one age: the longest is first, so that no processor waits late.
        for item in sorted(objects, key=_urgency, reverse=True):
            statements.append(_statement(item.name, [str(item.source)], item.command(), f"{item.name}.d"))
            tools[item.name] = item.tool
        manifest = folder / f"{target.name}.ninja"
        log = target.parent.parent / "build.log"
        manifest.write_text(RULE + "".join(statements))
        command = [*find(), "-C", str(folder), "-f", manifest.name, f"-j{jobs}", str(target)]
        compiled = [folder / name for name in names]
        for path in compiled:  # ninja compares times, and an older file may have replaced a newer one
            noted = _noted(path)
            if path.exists() and noted.exists() and noted.read_text() != _content(path):
                path.unlink()
        try:
            _run(command, tools, lock, log)
        finally:
            for path in filter(Path.exists, compiled):
                _noted(path).write_text(_content(path))


def _urgency(item: Object) -> tuple[int, int]:
    """The minute in which a source was saved, and its size."""
    status = item.source.stat()
    return int(status.st_mtime) // 60, status.st_size


def _statement(target: str, inputs: Sequence[str], command: Sequence[str], depfile: str = "") -> str:
    """A statement in ninja's language."""
    names = [re.sub(r"[$ :]", r"$\g<0>", name) for name in (target, *inputs)]
    words = shlex.join(command).replace("$", "$$")
    return f"build {names[0]}: run {' '.join(names[1:])}\n  words = {words}\n  depfile = {depfile}\n"


def _noted(target: Path) -> Path:
    """The file with what _content() was when an object was made."""
    return target.with_suffix(".sum")


def _content(target: Path) -> str:
    """A hash of what a compiler has read for an object."""
    return cache.fingerprint((), *sorted(listed(target)))


def listed(target: Path) -> set[Path]:
    """The real paths of the files that a compiler has read for an object, but for those that are gone."""
    depfile = Path(f"{target}.d")
    return names_in(depfile.read_text()) if depfile.exists() else set()


def names_in(depfile: str) -> set[Path]:
    """The real paths of the files of a dependency file, but for those that are gone."""
    words = re.findall(r"(?:\\.|[^\s\\])+", depfile)
    names = (re.sub(r"[\\$](.)", r"\1", word) for word in words if not word.endswith(":"))
    return {path for path in map(cache.resolved, names) if path.is_file()}


def _run(command: Sequence[str], tools: Mapping[str, Sequence[str]], lock: int, log: Path) -> None:
    """Run ninja until a command of it fails. tools: what makes each target. lock: a descriptor of all."""
    log.unlink(missing_ok=True)
    output = ""
    env = toolchain.environment()
    pipes: dict = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with subprocess.Popen(command, env=env, pass_fds=(lock,), errors="replace", **pipes) as process:
        assert process.stdout
        for line in process.stdout:
            output += line
            if output.count(MARK) == 3:
                process.terminate()  # nobody waits for the others
    if process.returncode == 0:
        return
    tool = "ninja"
    if MARK in output:
        _, target, output = output.split(MARK)[:3]
        tool = shlex.join(tools[target])
    output = output.lstrip("\n")
    log.write_text(output)
    signs = ((sign, line) for sign in REASONS.split("|") for line in output.splitlines())
    reason = next((line for sign, line in signs if sign in line.lower()), "no reason given")
    raise BuildError(f"{tool} failed: {reason.strip()} (full output: {log})", output)
