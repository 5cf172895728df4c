#!/bin/sh
# Try third-party clients against `gpt.py serve`: each gets an environment of its own, with the versions below.
# Then tests/third_party runs. It takes a minute or two, and 600 MB below WORK.
# usage: scripts/try-clients.sh [PYTEST OPTION...]
# PYTHON names the interpreter that has the project's packages; WORK keeps the environments in another folder than
# a temporary one.
set -eu
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
"$PYTHON" -c 'import starlette, hypercorn' || { echo "$PYTHON has no starlette: pip install -e '.[serve]'" >&2; exit 2; }
if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
mkdir -p "$WORK"
export PIP_DISABLE_PIP_VERSION_CHECK=1

if ! "$PYTHON" -m pip download -q --no-deps -d "$WORK/probe" openai==3.51.0 > "$WORK/probe.log" 2>&1; then
    # A wrong version would be an error; only a registry that cannot be reached is a reason to skip.
    grep -qiE 'connection|resolution|timed out|network' "$WORK/probe.log" || { cat "$WORK/probe.log" >&2; exit 1; }
    echo "skipped: pip reaches no package index"
    exit 0
fi

while read -r name package; do
    [ -x "$WORK/$name/bin/pip" ] || "$PYTHON" -m venv "$WORK/$name"
    "$WORK/$name/bin/pip" install -q "$package"
done <<END
openai openai==3.51.0
litellm litellm==1.106.2
langchain langchain-openai==1.7.3
llm llm==0.36
schemathesis schemathesis==4.32.5
END
if command -v npm > /dev/null; then
    npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$WORK/node" openai@7.55.0
else
    echo "npm is missing: its client is skipped"
fi
CLIENTS=$WORK "$PYTHON" -m pytest -q tests/third_party "$@"
