#!/bin/sh
# Try the Linux wheels of dist/ in Debians without a compiler: scripts/try-wheel.py in x86-64 ones, and a text under qemu
# by a processor without AVX2, and by ARM ones without and with dot products.
# usage: scripts/try-wheels.sh FOLDER [SUITE...]     as root on Debian on x86-64, with mmdebstrap, bubblewrap and qemu-user-static
# FOLDER keeps the systems, 0.4 GB each, for the next call. PYTHON runs the checkout, MIRROR names Debian's mirror.
set -eu

# Run a command in a system, whose /proc/cpuinfo is the file $cpuinfo.
in_system() {
    system=$1
    shift
    CPUINFO=${cpuinfo:-/proc/cpuinfo} timeout 1800 scripts/in-debian.sh "$system" \
        "$suite,ca-certificates,python3,python3-venv" "$@"
}

# The same short text as the checkout's, by qemu as a processor: emulated ROOT ARCHITECTURE PROCESSOR MODULES
emulated() {
    echo "== qemu-$2 -cpu $3"
    cp "/usr/bin/qemu-$2-static" "$1/try/"
    in_system "$1" "/try/qemu-$2-static" -cpu "$3" -E PYTHONPATH="$4" /usr/bin/python3 -m shakespeare \
        -m shakes1024 --num-samples 1 --max-new-tokens 100 --prompt ROMEO: > "$folder/text"
    cmp "$folder/text" "$folder/expected"
    echo "ok: the text is the checkout's"
}

if [ $# -eq 0 ] || [ "$(id -u)" != 0 ] || [ "$(uname -m)" != x86_64 ]; then
    sed -n '4s/^# //p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
$python gpt.py -m shakes1024 --num-samples 1 --max-new-tokens 100 --prompt ROMEO: > "$folder/expected"

for suite in ${@:-bookworm trixie sid}; do
    root=$folder/$suite
    echo "== $suite: $(in_system "$root" python3 --version), $(in_system "$root" ldd --version | head -n 1)"
    rm -rf "$root/venv" "$root/try"
    mkdir "$root/try"
    cp dist/*manylinux*x86_64.whl README.md scripts/try-wheel.py "$root/try"
    in_system "$root" python3 -m venv /venv
    in_system "$root" sh -c '/venv/bin/pip install -q "$(ls /try/*.whl)[serve]"'
    in_system "$root" sh -c '! command -v c++ g++ clang++ && /venv/bin/shakespeare doctor'
    in_system "$root" /venv/bin/python /try/try-wheel.py /try/README.md /venv/bin/shakespeare
    plain='avx[^ ]*|fma|f16c|bmi[12]|abm|movbe'
    sed -E "s/ ($plain)\\>//g" /proc/cpuinfo > "$folder/cpuinfo"
    modules=$(echo "$root"/venv/lib/python3*/site-packages)
    cpuinfo=$folder/cpuinfo emulated "$root" x86_64 Nehalem "${modules#"$root"}"
done

root=$folder/arm64
if [ ! -e "$root" ]; then
    rm -rf "$root.unfinished"
    mmdebstrap --quiet --mode=root --include=libstdc++6,python3 --arch=arm64 --variant=extract --skip=check/qemu \
        bookworm "$root.unfinished" ${MIRROR:+"$MIRROR"}
    mkdir "$root.unfinished/try"
    mv "$root.unfinished" "$root"
fi
rm -rf "$root/wheel"
$python -m pip install -q --target "$root/wheel" --python-version 3.11 --only-binary=:all: \
    --platform manylinux_2_17_aarch64 --platform manylinux_2_28_aarch64 dist/*manylinux*aarch64.whl
for processor in cortex-a57: max:asimddp; do
    echo "Features : fp asimd ${processor#*:}" > "$folder/cpuinfo"
    cpuinfo=$folder/cpuinfo emulated "$root" aarch64 "${processor%:*}" /wheel
done
