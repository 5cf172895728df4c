"""4Daccess: one element of a 4-D tensor."""

import click


@click.command("4Daccess")
def four_d_access() -> bool:
    """Read one element of a 4-D tensor through the extension's accessor."""
    from shakespeare.lab import correctness

    return correctness.four_d_access(click.echo)
