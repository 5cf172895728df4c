# Jobs of .ci/run and .ci/checks: each runs in the background, so that a signal ends the script and all jobs at once.
set -euo pipefail
set -m  # a process group for each job

work=$(mktemp -d)
chmod 755 "$work"  # another user's home is in it
trap 'exit 143' HUP INT TERM
trap 'for job in $(jobs -p); do kill -- "-$job" 2>> "$work/ended" || true; done; wait; rm -rf --one-file-system "$work"' EXIT

# Start a job: start NAME COMMAND...
start() {
    local name=$1
    shift
    touch "$work/$name" "$work/$name.err"  # the job may come to it later than finish(), whose tail then gives up
    "$@" > "$work/$name" 2> "$work/$name.err" < /dev/null &
}

# Print the output of the job that was started as NAME with process $2, as it comes. Exit if the job fails.
finish() {
    tail --quiet --follow --lines=+1 --pid="$2" "$work/$1" "$work/$1.err" | grep --line-buffered -v '^PASSED ' &
    local printer=$! code=0
    wait "$2" || code=$?
    wait "$printer" || true  # 1: it had nothing to print
    [ "$code" = 0 ] || { echo "$1 failed with exit code $code" >&2; exit "$code"; }
}

# Run a job to its end.
run() {
    start "$@"
    finish "$1" $!
}
