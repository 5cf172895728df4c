"""doctor: what this machine offers."""

import click


@click.command()
def doctor() -> bool:
    """Check what this machine offers for the parts, and name the remedy for what is missing.

    Lines that begin with -- are about optional features. The exit code is 1 if anything is broken.
    """
    from shakespeare.lab import doctor as examination

    return examination.run(click.echo)
