"""This repository against other engines."""
