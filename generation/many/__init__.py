"""Many texts: jobs in files, over processes, GPUs and machines."""

SHARD_SIZE = 1024  # texts of a file
SHARD_SECONDS = 3600.0  # that a worker may take for a file
GPU_WORKERS = 3  # of a GPU: some make requests and JSON while it writes the texts of another
