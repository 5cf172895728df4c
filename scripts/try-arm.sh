#!/bin/sh
# Try the project on ARM, in an arm64 Debian under qemu: compile the extension, test every part and let it write a
# text, and run the tests of attention and of the engines. It takes half an hour.
# usage: scripts/try-arm.sh FOLDER [PYTEST OPTION...]     as root on Debian on x86-64
# FOLDER keeps the system, some 2 GB, for the next call. SUITE and MIRROR name another Debian, TORCH another version of
# PyTorch. The default is the last one whose ARM wheel on PyPI is for the CPU alone: later ones bring gigabytes of CUDA.
# For those, PIP_EXTRA_INDEX_URL can name PyTorch's index of CPU wheels.
set -eu

# The processor that qemu imitates: /proc/cpuinfo would still be this machine's, and -mcpu=native reads it.
PROCESSOR=neoverse-n1
cpuinfo() {
    for core in $(seq 0 $(($(nproc) - 1))); do
        printf '%-16s: %s\n' processor "$core" BogoMIPS 50.00 \
            Features "fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp" \
            "CPU implementer" 0x41 "CPU architecture" 8 "CPU variant" 0x3 "CPU part" 0xd0c "CPU revision" 1
        echo
    done
}

# Let the kernel run ARM programs by qemu until this script ends. F: qemu is opened now, so a chroot needs no copy.
register() {
    formats=/proc/sys/fs/binfmt_misc
    [ -e "$formats/register" ] || mount -t binfmt_misc binfmt_misc "$formats" ||
        { echo "this kernel has no binfmt_misc, by which qemu would run ARM programs" >&2; exit 1; }
    entry=try-arm-$(basename "$folder")
    [ ! -e "$formats/$entry" ] || echo -1 > "$formats/$entry"
    # The start of an ELF file: 64 bits, little-endian; e_type 2 or 3, a program; e_machine 0xb7, AArch64.
    magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    qemu=$folder/tools/usr/bin/qemu-aarch64-static
    printf ':%s:M::%s:%s:%s:FC' "$entry" "$magic" "$mask" "$qemu" > "$formats/register"
    trap 'echo -1 > "$formats/$entry"' EXIT
    trap 'exit 130' INT TERM
}

# Run a command in the arm64 system, in the copy of the checkout.
arm() {
    chroot "$root" /usr/bin/env -i PATH=/venv/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 QEMU_CPU="$PROCESSOR" \
        TORCH_EXTENSIONS_DIR=/extensions PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_NO_CACHE_DIR=1 \
        PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-}" \
        sh -c 'cd /project && exec "$@"' sh "$@"
}

# Run a command in the arm64 system and keep whether it passed.
step() {
    echo "== $*"
    start=$(date +%s)
    if arm "$@"; then verdict=passed; else verdict=FAILED; fi
    echo "$verdict: $* ($(($(date +%s) - start)) s)" | tee -a "$folder/results"
}

# Everything that needs mounts. The mounts and all processes end with this process's namespaces.
inside() {
    root=$folder/root
    register
    if [ ! -e "$root" ]; then
        rm -rf --one-file-system "$root.unfinished"
        "$folder/tools/usr/bin/mmdebstrap" --mode=root --arch=arm64 --variant=apt --skip=check/qemu \
            --include=ca-certificates,g++,python3,python3-dev,python3-venv \
            "${SUITE:-bookworm}" "$root.unfinished" ${MIRROR:+"$MIRROR"}
        mv "$root.unfinished" "$root"
    fi
    mount -t proc proc "$root/proc"
    cpuinfo > "$folder/cpuinfo"
    mount --bind "$folder/cpuinfo" "$root/proc/cpuinfo"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount --rbind /dev "$root/dev"
    cat /etc/resolv.conf > "$root/etc/resolv.conf"
    cat /etc/ssl/certs/ca-certificates.crt > "$root/etc/ssl/certs/ca-certificates.crt"  # a proxy's may be among them
    rm -rf "$root/project" "$root/extensions"
    mkdir -m 700 "$root/project" "$root/extensions"
    git -c safe.directory='*' ls-files -z | tar -c --null --files-from=- | tar -x --no-same-owner -C "$root/project"

    [ -x "$root/venv/bin/pip" ] || arm python3 -m venv /venv
    # PyTorch chooses the versions of its own dependencies; ours are the tested ones.
    arm sh -c 'grep -v ^torch== constraints.txt > /tmp/constraints.txt'
    arm pip install -q -c /tmp/constraints.txt "torch==${TORCH:-2.10.0}" -e '.[torch]' pytest pytest-xdist hypothesis

    : > "$folder/results"
    arm sh -c 'uname -m; g++ --version | head -n 1; python --version'
    step python gpt.py doctor  # compiles
    for part in $(arm python -c 'from shakespeare.attention_ext import PARTS; print(*PARTS)'); do
        step python gpt.py "$part" -N 128 -br 32 -bc 32
        text="--inference -m shakes256 --num-samples 1 --max-new-tokens 100"
        step sh -c "python gpt.py $part $text > /tmp/$part && cat /tmp/$part && cmp /tmp/part0 /tmp/$part"
    done
    step python -m pytest -q -p no:cacheprovider tests/attention_ext tests/generation/engines/test_engine.py "$@"
    echo "== $(arm python -c 'import platform, torch; print("torch", torch.__version__, platform.machine())'), in sum:"
    cat "$folder/results"
    ! grep -q FAILED "$folder/results"
}

if [ "${1:-}" = --inside ]; then  # the call below
    folder=$2
    shift 2
    inside "$@"
    exit
fi

if [ $# -eq 0 ] || [ "$(id -u)" != 0 ] || [ "$(uname -m)" != x86_64 ]; then
    sed -n '4s/^# //p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
if [ ! -e "$folder/tools" ]; then
    mkdir -p "$folder/packages"
    (cd "$folder/packages" && apt-get download -qq -o APT::Sandbox::User=root qemu-user-static mmdebstrap)
    for package in "$folder"/packages/*.deb; do
        dpkg -x "$package" "$folder/tools.unfinished"
    done
    mv "$folder/tools.unfinished" "$folder/tools"
fi
unshare --mount --pid --fork --kill-child --mount-proc nice -n 10 scripts/try-arm.sh --inside "$folder" "$@"
