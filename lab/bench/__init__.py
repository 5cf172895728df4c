"""gpt.py bench: attention timed over a sweep of sizes."""
