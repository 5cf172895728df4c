#!/bin/bash
# Simulates the inner loops of attention and of int8 products on processors that are not at hand, and prints cycles
# and the share of the peak. llvm-mca knows a processor's units and latencies, and assumes that all data are in L1.
#
#     scripts/simulate.sh [PROCESSOR...]
#
# Needs ziglang in .venv, which compiles, and llvm-mca: $LLVM_MCA, else llvm-mca-22 (Debian's llvm-22) or llvm-mca.
# LLVM's model of apple-m1 is that of an older core, with three units for vectors instead of four. There is none of
# Alder Lake's efficiency cores. Zen 1's stands for it: both compute 256 bits in two halves. Sandy Bridge is the
# last x86 processor whose code is SSE; others without AVX are similar.
set -euo pipefail
cd "$(dirname "$0")/.."
mca=${LLVM_MCA:-$(command -v llvm-mca-22 || command -v llvm-mca)}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

# Name; architecture; what zig and llvm-mca call it; its multiply-add; its product of bytes.
fmla='fmla v%d.4s, v30.4s, v31.s[0]' sdot='sdot v%d.4s, v30.16b, v31.16b'
fmadd='vfmadd231ps %%ymm14, %%ymm15, %%ymm%d' mulps='mulps %%xmm15, %%xmm%d' pmaddwd='vpmaddwd %%ymm14, %%ymm15, %%ymm%d'
processors="apple-m1;aarch64;apple_m1;apple-m1;$fmla;$sdot
neoverse-v2;aarch64;neoverse_v2;neoverse-v2;$fmla;$sdot
neoverse-n1;aarch64;neoverse_n1;neoverse-n1;$fmla;$sdot
zen2;x86_64;znver2;znver2;$fmadd;$pmaddwd
alderlake P;x86_64;alderlake;alderlake;$fmadd;{vex} vpdpbusd %%ymm14, %%ymm15, %%ymm%d
alderlake E;x86_64;alderlake;znver1;$fmadd;-
SSE;x86_64;x86_64_v2;sandybridge;$mulps;pmaddwd %%xmm15, %%xmm%d"

# A function for each loop. A file each, because their sources name their blocks alike.
cat > "$work/products.cpp" <<'END'
#include "simd/portable/products.cpp"
namespace portable {
void scores(float* C, int64_t ldC, const float* A, int64_t ldA, const float* B, int64_t ldB, int64_t depth) {
    register_block<ROWS, VECS, false, false>(C, ldC, A, ldA, 1, B, ldB, depth, depth);
}
void values(float* C, int64_t ldC, const float* A, int64_t ldA, const float* B, int64_t ldB, int64_t depth) {
    register_block<ROWS, VECS, true, false>(C, ldC, A, 1, ldA, B, ldB, depth, depth);
}
}
END
echo '#include "simd/portable/softmax.cpp"' > "$work/softmax.cpp"
cat > "$work/int8.cpp" <<'END'
#include "simd/portable/int8_products.cpp"
namespace portable {
void int8(float* C, int64_t ldC, const uint32_t* A, int64_t ldA, const uint32_t* B, int64_t ldB, int64_t blocks) {
    int8_block<ROWS, VECS, false>(C, ldC, A, ldA, B, ldB, blocks);
}
}
END

# loop FILE FUNCTION OPERATION: of the function's loops of one block, that with the most of an operation
loop() {
    awk -v name="$2" -v operation="$3" '
        /^_Z[A-Za-z0-9_]*:/ { inside = $0 ~ name }
        /^\.?L[A-Za-z0-9_]*:/ { label = $1; sub(/:.*/, "", label); body = ""; count = 0; next }
        inside && /^\t[a-z{]/ {
            body = body $0 "\n"
            count += $0 ~ operation
            sub(/[ \t]*(\/\/|#).*/, "")
            if ($1 ~ /^(b\.|cbn?z|tbn?z|j)/ && $NF == label && count > most) { most = count; found = body }
        }
        END { printf "%s", found }' "$1"
}

# cycles ARCHITECTURE PROCESSOR < loop: of an iteration
cycles() {
    "$mca" -mtriple="$1-linux-gnu" -mcpu="$2" -iterations=1000 2> /dev/null |
        awk '/^Total Cycles/ { printf "%.1f", $3 / 1000 }'
}

# peak ARCHITECTURE PROCESSOR INSTRUCTION: independent ones in a cycle
peak() {
    local registers=12
    [ "$1" = aarch64 ] && registers=24
    for ((i = 0; i < registers; i++)); do printf "\t$3\n" $i; done | cycles "$1" "$2" |
        awk -v n=$registers '{ printf "%.0f", n / $1 }'
}

echo "| processor | loop | instructions | cycles | of the peak |"
echo "|---|---|---|---|---|"
while IFS=';' read -r name arch compiled simulated multiply_add bytes; do
    [ $# = 0 ] || [[ " $* " == *" $name "* ]] || continue
    if [ -z "$(peak "$arch" "$simulated" "$multiply_add")" ]; then
        echo "| $name | not known to this llvm-mca | | | |"
        continue
    fi
    for file in products softmax int8; do
        .venv/bin/python -m ziglang c++ -target "$arch-linux-gnu" "-mcpu=$compiled" -std=c++17 -O3 -g0 \
            -fno-math-errno -fno-trapping-math -fvisibility=hidden -Iattention_ext/csrc \
            -S "$work/$file.cpp" -o "$work/$file.s" < /dev/null 2> "$work/log" || { cat "$work/log"; exit 1; }
    done
    for row in "Q K^T;products;scores;fmla|vfmadd|mulps;$multiply_add" \
        "P V;products;values;fmla|vfmadd|mulps;$multiply_add" \
        "int8;int8;4int8E;sdot|vpmaddwd|vpdpbusd|pmaddwd;$bytes"; do
        IFS=';' read -r title file function operation instruction <<< "$row"
        loop "$work/$file.s" "$function" "$operation" > "$work/loop.s"
        took=$(cycles "$arch" "$simulated" < "$work/loop.s")
        count=$(grep -cE "$operation" "$work/loop.s") || true
        share=""
        [ "$instruction" = - ] ||
            share=$(awk -v n="$count" -v c="$took" -v p="$(peak "$arch" "$simulated" "$instruction")" \
                'BEGIN { printf "%.0f %%", 100 * n / c / p }')
        echo "| $name | $title | $(wc -l < "$work/loop.s"), $count products | $took | $share |"
    done
    loop "$work/softmax.s" online_softmax 'fml|vfmadd|mulps' > "$work/loop.s"
    echo "| $name | softmax, a vector | $(wc -l < "$work/loop.s") | $(cycles "$arch" "$simulated" < "$work/loop.s") | |"
done <<< "$processors"
