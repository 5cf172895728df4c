"""A user's kernel: a file as a part, its trial against the parts, and the course."""
