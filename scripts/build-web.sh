#!/usr/bin/env bash
# Makes the page in a folder, web/dist by default: scripts/build-web.sh [FOLDER]
# It needs the package ziglang, which compiles the kernels to WebAssembly: pip install '.[web]'
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m web.build "$@"
