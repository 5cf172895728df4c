"""Many texts: jobs in files, over processes and machines."""

SHARD_SIZE = 1024  # texts of a file
STALL_SECONDS = 120.0  # of silence: a worker that opens its model on a busy machine says nothing
