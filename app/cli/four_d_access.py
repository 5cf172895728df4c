"""4Daccess: one element of a 4-D tensor."""

import sys

import click


@click.command("4Daccess")
def four_d_access() -> None:
    """Read one element of a 4-D tensor through the extension's accessor."""
    from lab import correctness

    if not correctness.four_d_access(echo=click.echo):
        sys.exit(1)
