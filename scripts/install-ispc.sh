#!/bin/sh
# Unpack the ISPC compiler into PREFIX (default ~/.local/ispc) on Debian 12, which has no ispc package. apt
# fetches Debian 13's packages from the mirror that it already uses and checks their signatures. Nothing
# outside PREFIX is changed. On other systems, take your distribution's ispc or Intel's release.
# usage: scripts/install-ispc.sh [PREFIX]; then put PREFIX on PATH, or set ISPC=PREFIX/ispc
set -eu

prefix=${1:-$HOME/.local/ispc}
mkdir -p "$prefix"
prefix=$(cd "$prefix" && pwd)
if [ -x "$prefix/ispc" ] && "$prefix/ispc" --version 2>/dev/null; then exit 0; fi

fail() { echo "install-ispc: $1" >&2; exit 1; }
command -v apt-get >/dev/null || fail "this needs apt-get; on other systems install ispc from your distribution"
[ "$(dpkg --print-architecture)" = amd64 ] || fail "this needs amd64; this machine is $(dpkg --print-architecture)"
lists() { apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages'; }
mirror=$(lists | grep -v security | head -n 1)
if [ -z "$mirror" ]; then
    apt-get update -qq || fail "apt-get update failed; run it as root once"
    mirror=$(lists | grep -v security | head -n 1)
fi
[ -n "$mirror" ] || fail "apt has no package mirror configured"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" > "$work/sources.list"
apt_trixie() {
    apt-get -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/nonexistent \
        -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" \
        -o APT::Sandbox::User="$(id -un)" "$@"
}
apt_trixie update -qq || fail "the mirror has no Debian 13 (trixie)"
(cd "$work/debs" && apt_trixie download -qq ispc/trixie libllvm19/trixie libc6/trixie) ||
    fail "the packages could not be downloaded"
for package in "$work"/debs/*.deb; do dpkg -x "$package" "$prefix"; done

# The packages' glibc is newer than Debian 12's, so the compiler runs under its own loader.
cat > "$prefix/ispc" <<SCRIPT
#!/bin/sh
libraries=$prefix/usr/lib/x86_64-linux-gnu
exec "\$libraries/ld-linux-x86-64.so.2" --library-path "\$libraries:/usr/lib/x86_64-linux-gnu" \\
    "$prefix/usr/bin/ispc" "\$@"
SCRIPT
chmod +x "$prefix/ispc"
"$prefix/ispc" --version || fail "the unpacked compiler does not run"
