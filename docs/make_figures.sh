#!/usr/bin/env bash
# Remakes every figure and every block of output of the walk on a CPU, in some six minutes on an idle machine.
#
#     docs/make_figures.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" gpt.py bench part0,part1,part2,part3,part4,sdpa -N 128:4096*2 -d 32 -t 1,2 --plot "$work/lengths" > /dev/null
"$python" gpt.py bench part4 -N 1024 -d 32,64,128 -br 16,32,48,64,96,128,192,256,512,1024 \
    -bc 16,32,64,128,256,512,1024 -r 5 --min-time 0.05 --plot "$work/tiles" > /dev/null
mkdir -p docs/figures
cp "$work"/lengths/{time,memory,roofline}.svg "$work"/tiles/tiles.svg docs/figures/
"$python" gpt.py bench --load benchmarks/results/bench_flash-nvidia-h100.json --plot "$work/flash" > /dev/null
cp "$work/flash/rates.svg" docs/figures/rates.svg
"$python" docs/rerun.py docs/learn/attention.md docs/learn/rules.md
