#!/bin/sh
# Try the Linux wheels of dist/ in Debians without a compiler: scripts/try-wheel.py in x86-64 ones, and a text under qemu
# by a processor without AVX2, and by ARM ones without and with dot products.
# usage: scripts/try-wheels.sh FOLDER [SUITE...]     as root on Debian on x86-64, with mmdebstrap and qemu-user-static
# FOLDER keeps the systems, 0.4 GB each, for the next call. PYTHON runs the checkout, MIRROR names Debian's mirror.
set -eu

# Run a command in a system, whose /proc/cpuinfo is the file $cpuinfo; it ends with its processes and mounts.
in_system() {
    root=$1 cpuinfo=${cpuinfo:-/proc/cpuinfo} unshare --mount --pid --fork --kill-child sh -c '
        shift
        mount -t proc proc "$root/proc"
        mount --bind "$cpuinfo" "$root/proc/cpuinfo"
        mount --rbind /dev "$root/dev"
        exec env -i PATH=/venv/bin:/usr/bin:/bin:/usr/sbin HOME=/root LANG=C.UTF-8 \
            PIP_CERT=/etc/ssl/certs/ca-certificates.crt timeout 900 chroot "$root" "$@"' sh "$@"
}

# Make a system if it is not there, from packages that mmdebstrap takes: make FOLDER SUITE PACKAGE,... [OPTION...]
make() {
    root=$1 suite=$2 include=$3
    shift 3
    [ -e "$root" ] && return
    # An archive that nobody has signed for weeks is as good here.
    mmdebstrap --quiet --mode=root --aptopt='Acquire::Check-Valid-Until "false"' --include="$include" "$@" \
        "$suite" "$root.unfinished" ${MIRROR:+"$MIRROR"}
    mkdir -p "$root.unfinished/proc" "$root.unfinished/dev" "$root.unfinished/try"
    mv "$root.unfinished" "$root"
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
    make "$root" "$suite" ca-certificates,python3,python3-venv --variant=apt
    cp dist/*manylinux*x86_64.whl README.md scripts/try-wheel.py "$root/try"
    cat /etc/resolv.conf > "$root/etc/resolv.conf"
    cat /etc/ssl/certs/ca-certificates.crt > "$root/etc/ssl/certs/ca-certificates.crt"  # a proxy's may be among them
    echo "== $suite: $(in_system "$root" python3 --version), $(in_system "$root" ldd --version | head -n 1)"
    rm -rf "$root/venv"
    in_system "$root" python3 -m venv /venv
    in_system "$root" sh -c 'pip install -q "$(ls /try/*.whl)[serve]"'
    in_system "$root" sh -c '! command -v c++ g++ clang++ && shakespeare doctor'
    in_system "$root" python /try/try-wheel.py /try/README.md shakespeare
    plain='avx[^ ]*|fma|f16c|bmi[12]|abm|movbe'
    sed -E "s/ ($plain)\\>//g" /proc/cpuinfo > "$folder/cpuinfo"
    modules=$(echo "$root"/venv/lib/python3*/site-packages)
    cpuinfo=$folder/cpuinfo emulated "$root" x86_64 Nehalem "${modules#"$root"}"
done

root=$folder/arm64
make "$root" bookworm libstdc++6,python3 --arch=arm64 --variant=extract --skip=check/qemu
rm -rf "$root/wheel"
$python -m pip install -q --target "$root/wheel" --python-version 3.11 --only-binary=:all: \
    --platform manylinux_2_17_aarch64 --platform manylinux_2_28_aarch64 dist/*manylinux*aarch64.whl
for processor in cortex-a57: max:asimddp; do
    echo "Features : fp asimd ${processor#*:}" > "$folder/cpuinfo"
    cpuinfo=$folder/cpuinfo emulated "$root" aarch64 "${processor%:*}" /wheel
done
