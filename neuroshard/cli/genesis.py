"""`neuroshard genesis`: make a Genesis folder from text, check one, serve one on the local network."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from neuroshard.cli.options import AsJson, DataDir, given

app = typer.Typer(help="Make, check and serve training data.", no_args_is_help=True)

FolderArgument = Annotated[Path, typer.Argument(help="A Genesis folder.")]


@app.command("build")
def build(
    text: Annotated[Path, typer.Option("--text", metavar="FOLDER", help="Folder with text files.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The Genesis folder to make.")],
    vocabulary: Annotated[
        int | None, typer.Option(metavar="N", help="Token ids in all, up to 32000. (default: by the size of the text)")
    ] = None,
    token: Annotated[str | None, typer.Option(help="Wallet that signs the data; NEUROSHARD_TOKEN is better.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds the token.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Turn text files into signed, tokenised shards that a node can train on."""
    from neuroshard.config.loading import load_settings
    from neuroshard.genesis import BuildOptions, FolderText, build_genesis
    from neuroshard.node.identity import wallet_of

    wallet, _, _ = wallet_of(load_settings(given(token=token, token_file=token_file, data_dir=data_dir)))
    shown = _ProgressLine()
    built = build_genesis(
        FolderText(text),
        out,
        wallet,
        now=datetime.now(UTC).isoformat(timespec="seconds"),
        options=BuildOptions(vocabulary=vocabulary),
        progress=shown.show,
    )
    shown.end()
    report = built.report
    if as_json:
        typer.echo(report.to_json().decode())
        return
    verb = "Already there" if built.is_reused else "Built"
    typer.echo(
        f"{verb}: {report.tokens:,} tokens in {report.shards} shards from {report.documents:,} documents "
        f"({report.text_bytes / 1e6:.1f} MB), vocabulary {report.vocabulary:,}, signed by wallet {wallet.wallet_id}."
    )
    if built.has_default_run and not built.is_reused:
        typer.echo(
            "The default run that was published here stays. Where the data changed, nodes cannot join it with them:"
        )
        typer.echo(f"then publish another one: neuroshard run publish RUN --genesis {out}")
    typer.echo(f"Train on it: neuroshard --genesis {out}")


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


class _ProgressLine:
    """One line on a terminal that changes; nothing elsewhere."""

    def __init__(self) -> None:
        self._wanted = sys.stderr.isatty()

    def show(self, stage: str, fraction: float) -> None:
        """Tell how far the build is."""
        if self._wanted:
            sys.stderr.write(f"\r{stage:10} {fraction:4.0%}")
            sys.stderr.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._wanted:
            sys.stderr.write("\r" + " " * 16 + "\r")
