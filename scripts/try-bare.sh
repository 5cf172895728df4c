#!/bin/sh
# Run a command as a new user would: in a clone of the last commit, in a Debian with what the README asks for.
# usage: scripts/try-bare.sh FOLDER SUITE COMMAND     as root on Debian, with mmdebstrap and bubblewrap
# FOLDER keeps the system, and the clone in /home/user, for the next call.
set -eu
[ $# = 3 ] || { sed -n '3s/^# //p' "$0" >&2; exit 2; }
cd "$(dirname "$0")/.."

root=$1 packages=$2,git,ca-certificates,python3-venv,python3-dev,g++
in_debian() { setpriv --pdeathsig KILL scripts/in-debian.sh "$root" "$packages" "$@"; }
if [ ! -e "$root/home/user" ]; then
    in_debian useradd --create-home user
    git clone --quiet . "$root/home/user/clone"
    in_debian chown -R user:user /home/user/clone
fi
in_debian runuser -u user -- env HOME=/home/user sh -c 'cd ~/clone && exec bash -euc "$1"' sh "$3"
