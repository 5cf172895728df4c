"""Many texts: jobs in files, over processes and machines."""
