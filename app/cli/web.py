"""web: the page that runs the kernels in a browser."""

from pathlib import Path

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice


@click.command()
@options.integer("--port", "Port on 127.0.0.1; 0 takes a free one.", minimum=0, maximum=65535, default=8080)
@options.folder("--out", "Folder of the page's files.", show_default="in the build cache")
@options.flag("--build", "only_build", "Make the files and exit.")
def web(port: int, out: Path | None, only_build: bool) -> None:
    """Show a web page that writes, races and explains in your browser. Its files are made on first use."""
    from shakespeare.app import folder_server
    from shakespeare.web import build

    if out:
        build.put(out)
    folder = out or build.make()
    if only_build:
        click.echo(f"{folder}: publish the folder, or show it with gpt.py web")
        return
    try:
        server = folder_server.server(folder, port)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"--port {port}") from None
    with server:
        click.echo(f"http://127.0.0.1:{server.server_address[1]}/")
        notice("Ctrl-C ends it")
        server.serve_forever()
