"""Many texts: jobs in files, over processes, GPUs and machines."""

SHARD_SIZE = 1024  # texts of a file
SHARD_SECONDS = 3600.0  # that a worker may take for a file
GPU_WORKERS = 2  # of a GPU: one prepares and packs texts while the GPU writes those of the other
