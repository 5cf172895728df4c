#!/bin/sh
# Try third-party clients against `gpt.py serve`: each gets an environment of its own, with the versions below.
# Then tests/third_party runs. It takes a minute or two, and 600 MB below WORK.
# usage: scripts/try-clients.sh [PYTEST OPTION...]
# PYTHON names the interpreter that has the project's packages; WORK keeps the environments in another folder than
# a temporary one.
set -eu
cd "$(dirname "$0")/.."

# an environment, and what is installed into it
clients="
openai openai==3.51.0
litellm litellm==1.106.2
langchain langchain-openai==1.7.3
llm llm==0.36
schemathesis schemathesis==4.32.5
"
node_clients="openai@7.55.0"

PYTHON=${PYTHON:-.venv/bin/python}
"$PYTHON" -c 'import starlette, uvicorn' || { echo "$PYTHON has no starlette: pip install -e '.[serve]'" >&2; exit 2; }
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

echo "$clients" | while read -r name packages; do
    [ -n "$name" ] || continue
    stamp="$WORK/$name/installed: $packages"
    [ -e "$stamp" ] && continue
    echo "+ $name: pip install $packages"
    rm -rf "${WORK:?}/$name"
    "$PYTHON" -m venv "$WORK/$name"
    # shellcheck disable=SC2086  # several packages
    "$WORK/$name/bin/pip" install -q $packages
    : > "$stamp"
done
if command -v npm > /dev/null; then
    echo "+ node: npm install $node_clients"
    mkdir -p "$WORK/node"
    # shellcheck disable=SC2086
    (cd "$WORK/node" && npm install --silent --no-audit --no-fund --ignore-scripts --prefix . $node_clients)
else
    echo "npm is missing: its client is skipped"
fi
CLIENTS=$WORK "$PYTHON" -m pytest -q tests/third_party "$@"
