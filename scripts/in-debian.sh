#!/usr/bin/env bash
# Run a command as root in a Debian of its own, which reaches package servers as this machine does.
# usage: scripts/in-debian.sh FOLDER SUITE[,PACKAGE...] COMMAND...     as root on Debian, with mmdebstrap and bubblewrap
# FOLDER keeps the system for the next call. The command's processes and mounts end with this script, also if it is
# killed. MIRROR names another mirror than that of the machine's apt. The file CPUINFO stands for /proc/cpuinfo.
set -euo pipefail

if [ $# -lt 3 ] || [ "$(id -u)" != 0 ]; then
    sed -n '3s/^# //p' "$0" >&2
    exit 2
fi
cpuinfo=${CPUINFO:-/proc/cpuinfo}
root=$1 suite=${2%%,*} packages=${2#*,}
shift 2

if [ ! -e "$root" ]; then
    mirrors=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security || true)
    # An archive that nobody has signed for weeks is as good here.
    settings=$(echo 'Acquire::Check-Valid-Until "false";' && apt-config dump | grep -E '^Acquire::(https?|Retries)' || true)
    rm -rf --one-file-system "$root.unfinished"
    # mmdebstrap mounts /proc and /dev in the system; here nobody else sees that. An unfinished system is made anew, so
    # dpkg need not wait for the disk.
    setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child \
        mmdebstrap --quiet --mode=root --variant=minbase --include="$packages" --aptopt="$settings" \
        --dpkgopt=force-unsafe-io "$suite" "$root.unfinished" "${MIRROR:-${mirrors%%$'\n'*}}"
    mv "$root.unfinished" "$root"
fi

# The environment is that of the package clients. pip's files become variables, such as PIP_INDEX_URL. What they name
# is needed inside, and of a package index the folder above simple.
options=()
while IFS='=' read -r name value; do
    value=${value:1:-1}
    value=${value//\\n/ }
    variable=${name#*.}
    variable=PIP_${variable//-/_}
    variable=${variable^^}
    [ -n "${!variable:-}" ] || export "$variable=$value"
    for path in ${value//file:\/\//}; do
        path=${path%/simple}
        [[ $path = /* && -e $path ]] || continue
        mkdir -p "$root${path%/*}"
        options+=(--ro-bind "$path" "$path")
    done
done < <(python3 -m pip config list)
for file in /etc/hosts /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt /etc/npmrc ~/.npmrc; do
    [ ! -e "$file" ] || options+=(--ro-bind "$file" "${file/#"$HOME"//root}")
done
for name in $(compgen -e); do
    [[ $name =~ ^(CI|PIP_.*|OPENBLAS_.*|.*_(proxy|PROXY|CERTS?|CERT_FILE|CERT_DIR|CA_BUNDLE))$ ]] || unset "$name"
done
export HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin

exec bwrap --die-with-parent --unshare-pid --cap-add ALL --dev-bind "$root" / --proc /proc \
    --ro-bind "$cpuinfo" /proc/cpuinfo --dev /dev --perms 1777 --tmpfs /dev/shm \
    --dev-bind /sys /sys "${options[@]}" "$@"
