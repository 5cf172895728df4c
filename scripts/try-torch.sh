#!/bin/sh
# Try the project with other versions of PyTorch. In a virtual environment for each, run the first command of the
# README and the tests of attention, of the operators and of the engines. A version takes some minutes and gigabytes.
# usage: scripts/try-torch.sh VERSION... [-- PYTEST OPTION...]     e.g. scripts/try-torch.sh 2.10.0 2.15.0
# PYTHON names another interpreter than python3; WORK keeps the environments in another folder than a temporary one.
set -eu
cd "$(dirname "$0")/.."

versions=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    versions="$versions $1"
    shift
done
[ $# -eq 0 ] || shift
[ -n "$versions" ] || { echo "usage: scripts/try-torch.sh VERSION... [-- PYTEST OPTION...]" >&2; exit 2; }

if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
mkdir -p "$WORK"
# PyTorch chooses the versions of its own dependencies; ours are the tested ones.
grep -v '^torch==' constraints.txt > "$WORK/constraints.txt"
failed=
for version in $versions; do
    environment=$WORK/torch-$version
    echo "== torch $version"
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install -q --disable-pip-version-check "torch==$version"
    "$environment/bin/pip" install -q --disable-pip-version-check -c "$WORK/constraints.txt" -e '.[test]' "torch==$version" ||
        "$environment/bin/pip" install -q --disable-pip-version-check -e '.[test]' "torch==$version"
    mkdir -p -m 700 "$environment/extensions"
    export TORCH_EXTENSIONS_DIR="$environment/extensions"
    if "$environment/bin/python" gpt.py part4 --inference -m shakes256 --num-samples 1 > "$environment/text" &&
        "$environment/bin/python" -m pytest -q tests/attention_ext/test_attention.py \
            tests/attention_ext/test_operators.py tests/attention_ext/test_reference.py tests/generation "$@"; then
        echo "== torch $version: works"
    else
        echo "== torch $version: FAILED"
        failed="$failed $version"
    fi
done
[ -z "$failed" ] || { echo "failed with:$failed" >&2; exit 1; }
