"""doctor: what this machine offers."""

import sys

import click


@click.command()
def doctor() -> None:
    """Check what this machine offers for the parts, and name the remedy for what is missing.

    Lines that begin with -- are about optional features. The exit code is 1 if anything is broken.
    """
    from lab import doctor as examination

    if not examination.run(click.echo):
        sys.exit(1)
