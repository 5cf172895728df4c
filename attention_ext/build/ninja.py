"""Compiles by ninja: what a change concerns and no more, each object once for all libraries that link it.

A folder of objects belongs to a compiler, a processor and a checkout. ninja compares times only, so an object
is deleted when a file's digest changes. Compilers inherit the folder's lock: a killed build's are waited for.
"""

import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shakespeare.attention_ext import processor
from shakespeare.attention_ext.build import cache, toolchain
from shakespeare.attention_ext.parts import BuildError

NO_NINJA = "parts 1 to 4 are compiled by ninja, and none was found: pip install ninja"
DIGESTS, PROCESSOR = "sources.json", "processor"  # in a folder of objects; ccache hashes the latter
MARK = "\x1e"  # begins ninja's own lines, and the last one of a command that failed, with its status
COLORS = "DIAGNOSTICS"  # a variable of the shell: a terminal's colours are no other command
RULES = f"""\
rule compile
  command = {{ $words $${COLORS} -o $out.new && mv -f $out.new $out; }} || {{ echo "{MARK}$$?"; exit 1; }}
  depfile = $out.d
  description = $out
rule link
  command = $words || {{ echo "{MARK}$$?"; exit 1; }}
  description = $out
"""
# Signs of the line that says why a compiler failed, the most reliable first; the shell reports a crash.
REASONS = "no space left on device|undefined reference|error:|segmentation fault|killed|aborted|fatal:"
IN_A_SOURCE = re.compile(r"^\S.*:\d+:\d+: (fatal )?error: ", re.I | re.M)
ESCAPES = re.compile(r"\x1b\[[\d;]*[mK]|\x1b\].*?(?:\x1b\\|\x07)")  # colours and links


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
        ispc = self.source.suffix == ".ispc"
        ccache = None if ispc else shutil.which("ccache")
        depends = ("-M" if ispc else "-MMD", "-MF", f"{self.name}.d", "-MT" if ispc else "-MQ", self.name)
        words = (ccache, *self.tool, *self.flags, *depends, None if ispc else "-c")
        return [*filter(None, words), str(self.source)]


def find() -> list[str]:
    """ninja's command: the package's, else that on PATH. Raises BuildError if there is none."""
    for folder in (sysconfig.get_path("scripts"), None):
        if path := shutil.which("ninja", path=folder):
            return [path]
    if importlib.util.find_spec("ninja"):
        return [sys.executable, "-m", "ninja"]
    raise BuildError(NO_NINJA)


def build(
    folder: Path,
    objects: Sequence[Object],
    linker: Sequence[str],
    link: Sequence[str],
    target: Path,
    digests: Callable[[], Mapping[str, str]],
) -> None:
    """Compile the objects that a change concerns, those of changed sources first, and link `made`.

    folder: of the objects. linker, link: its command, and its arguments after the objects. digests: of each
    file that a source may include, by its real path, and of those that a user's source did include. The
    output of a failure stays in build.log beside the folder of `made`.
    Raises BuildError, with the compiler's `output`; OSError if folder cannot be written.
    """
    jobs = toolchain.jobs()
    folder.mkdir(mode=0o700, exist_ok=True)
    cache.check_owner(folder)
    with cache.locked(folder / cache.LOCK) as lock:
        before, start = digests(), time.time()
        changed = _forget(folder, before)
        command = [*linker, *(item.name for item in objects), *link, "-o", str(target)]
        # the longest first, so that no processor waits for one that began late
        queue = sorted(objects, key=lambda item: item.source.stat().st_size, reverse=True)
        statements = [_statement(item.name, "compile", [item.source], item.command()) for item in queue]
        statements.append(_statement(str(target), "link", [item.name for item in objects], command))
        manifest = folder / f"{target.name}.ninja"
        manifest.write_text(RULES + "".join(statements))
        (folder / PROCESSOR).write_text(processor.capabilities())
        tools = {item.name: item.tool for item in objects} | {str(target): tuple(linker)}
        first = [item.name for item in objects if os.path.realpath(item.source) in changed]
        for targets in filter(None, (first, [str(target)])):
            command = [*find(), "-C", str(folder), "-f", manifest.name, f"-j{jobs}", *targets]
            _run(command, tools, lock, target.parent.parent / "build.log")
        # One that was saved while it was compiled is not noted: it is compiled again.
        new = (path for path in digests().items() - before.items() if os.path.getmtime(path[0]) < start)
        _note(folder, _noted(folder) | dict(new))


def _statement(target: str, rule: str, inputs: Sequence[str | Path], command: Sequence[str]) -> str:
    """A statement in ninja's language."""
    names = [re.sub(r"[$ :]", r"$\g<0>", str(name)) for name in (target, *inputs)]
    words = shlex.join(command).replace("$", "$$")
    return f"build {names[0]}: {rule} {' '.join(names[1:])}\n  words = {words}\n"


def _forget(folder: Path, digests: Mapping[str, str]) -> set[str]:
    """Delete the objects of changed files, and note the digests; returns the files that changed."""
    known = _noted(folder)
    changed = {path for path, digest in digests.items() if known.get(path) != digest}
    gone = {path for path in known.keys() - digests if not os.path.exists(path)}
    changed |= gone
    for target in folder.glob("*/*.o") if changed else ():
        depfile = Path(f"{target}.d")
        if not depfile.exists() or changed & listed(depfile.read_text()):
            target.unlink()
    _note(folder, {path: known[path] for path in known.keys() - gone} | dict(digests))
    return changed


def listed(depfile: str) -> set[str]:
    """The real paths of the files that a compiler says it read."""
    words = re.findall(r"(?:\\.|[^\s\\])+", depfile)
    return {os.path.realpath(re.sub(r"[\\$](.)", r"\1", word)) for word in words if not word.endswith(":")}


def _noted(folder: Path) -> dict[str, str]:
    try:
        return json.loads((folder / DIGESTS).read_text())
    except (OSError, ValueError):  # a new folder
        return {}


def _note(folder: Path, digests: Mapping[str, str]) -> None:
    new = folder / f"{DIGESTS}.new"
    new.write_text(json.dumps(digests))
    new.replace(folder / DIGESTS)


def _run(command: Sequence[str], tools: Mapping[str, Sequence[str]], lock: int, log: Path) -> None:
    """Run ninja until a command of it fails. tools: what makes each target. lock: the folder's descriptor."""
    colors = {COLORS: "-fdiagnostics-color=always", "CLICOLOR_FORCE": "1"} if sys.stderr.isatty() else {}
    env = (
        {COLORS: "", "CCACHE_EXTRAFILES": PROCESSOR}
        | toolchain.environment()
        | {"NINJA_STATUS": MARK}
        | colors
    )
    said: list[str] = []
    tool: Sequence[str] | None = None
    status = 0
    pipes: dict = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with subprocess.Popen(command, env=env, pass_fds=(lock,), errors="replace", **pipes) as process:
        assert process.stdout
        for line in process.stdout:
            text, mark, code = line.partition(MARK)
            plain = ESCAPES.sub("", line)
            if plain.startswith("FAILED: "):
                target = plain.removeprefix("FAILED: ").rpartition("] ")[2].strip()
                tool, said = tools.get(target, ()), []
                next(process.stdout, "")  # the command
            elif tool and mark:
                # without a status the shell itself was killed, and the line is of another command
                said, status = [*said, text], int(code) if code.strip().isdigit() else 0
                process.terminate()  # nobody waits for the others
                break
            elif mark:
                said = []  # warnings of a command that succeeded
            else:
                said.append(line)
    if process.returncode == 0:
        return
    output = "".join(said)
    if status > 128:
        output += f"error: ended by a signal: {signal.strsignal(status - 128)}\n"
    plain = ESCAPES.sub("", output)
    log.write_text(plain)
    told = ((sign, line) for sign in REASONS.split("|") for line in plain.splitlines())
    reason = next((line for sign, line in told if sign in line.lower()), "no reason given")
    shown = output if IN_A_SOURCE.search(plain) else ""
    raise BuildError(f"{shlex.join(tool or command)} failed: {reason.strip()} (full output: {log})", shown)
