#!/bin/sh
# Compile all sources against the headers of other versions of PyTorch, which are taken from its wheels: nothing is
# installed. scripts/try-torch.sh also runs what is compiled.
# usage: scripts/check-headers.sh [VERSION...]     without one: the oldest that setup.cfg admits, and the newest
# PYTHON names another interpreter than .venv/bin/python; it needs the project's dependencies.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
oldest=$(sed -n 's/^ *torch>=//p' setup.cfg)
[ $# -gt 0 ] || set -- "$oldest.0" newest
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version; do
    wanted=torch
    [ "$version" = newest ] || wanted="torch==$version"
    mkdir "$work/$version"
    "$python" -m pip download -q --no-deps --no-cache-dir -d "$work/$version" "$wanted"
    "$python" - "$work/$version" <<'END'
import subprocess, sys, sysconfig, zipfile
from pathlib import Path

import pybind11

from shakespeare.attention_ext.build import recipes

work = Path(sys.argv[1])
(wheel,) = work.glob("torch-*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(work, [name for name in archive.namelist() if name.startswith("torch/include/")])
wheel.unlink()
operators = recipes.operators("portable")
step = recipes.module("training_step", ("training", "model"), "portable")
own = [*step.folders, recipes.ROOT, pybind11.get_include(), sysconfig.get_path("include")]
folders = [*own, work / "torch" / "include"]
command = [*step.compiler, *operators.flags, "-fsyntax-only", *(f"-I{folder}" for folder in folders)]
sources = [*operators.sources, *recipes.launcher().sources, *step.sources]
for source in sources:
    subprocess.run([*command, source], check=True)
print(f"{wheel.name}: {len(sources)} sources compile")
END
done
