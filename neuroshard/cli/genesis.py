"""`neuroshard genesis`: make a Genesis folder from text, check one, serve one on the local network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from neuroshard.cli import genesis_build
from neuroshard.cli.options import AsJson

app = typer.Typer(help="Make, check and serve training data.", no_args_is_help=True)

FolderArgument = Annotated[Path, typer.Argument(help="A Genesis folder.")]


app.command("build")(genesis_build.build)


@app.command("verify")
def verify(folder: FolderArgument, as_json: AsJson = False) -> None:
    """Hash every shard again and compare with the manifest. Exit code 6 when something is wrong."""
    from neuroshard.errors import DataError
    from neuroshard.genesis import verify_folder

    found = verify_folder(folder)
    if as_json:
        facts = {"sound": found.is_sound, "shards": found.total_shards, "checked": found.shards_checked}
        typer.echo(json.dumps({**facts, "signed_by": found.signed_by, "problems": found.problems}))
    else:
        signed = f"signed by {found.signed_by[:16]}" if found.signed_by else "not signed"
        typer.echo(f"{found.shards_checked} of {found.total_shards} shards checked; the manifest is {signed}.")
        for problem in found.problems:
            typer.echo(f"- {problem}")
    if not found.is_sound:
        raise DataError("The folder is not sound.", "Build it again, or fetch it again.")


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
