"""`neuroshard genesis`: make a Genesis folder from text, check one, serve one on the local network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuroshard.cli import genesis_build, genesis_look

app = typer.Typer(help="Make, check and serve training data.", no_args_is_help=True)

FolderArgument = Annotated[Path, typer.Argument(help="A Genesis folder.")]


app.command("build")(genesis_build.build)


app.command("verify")(genesis_look.verify)
app.command("status")(genesis_look.status)


@app.command("serve")
def serve(
    folder: FolderArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
) -> None:
    """Serve a Genesis folder over HTTP until Ctrl+C: a small CDN, with its state at /status.

    Ranges, conditional requests and cache headers work as caches in front of it expect.
    """
    import signal
    import threading

    from neuroshard.genesis import GenesisServer

    stopped = threading.Event()

    def on_signal(_number: int, _frame: object) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    with GenesisServer(folder, host=host, port=port) as server:
        typer.echo(f"Serving {folder} at {server.url} ; train with: neuroshard --genesis {server.url}")
        while not stopped.wait(0.5):  # in short turns, so that signals are delivered on every system
            pass
