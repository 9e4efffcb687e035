"""`neuroshard update`: look for a newer version, install it, or undo the update; each only on the user's command."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.options import AsJson, DataDir, given

if TYPE_CHECKING:
    from neuroshard.config.settings import Settings
    from neuroshard.update.applying import VersionChange
    from neuroshard.update.installation import Installation
    from neuroshard.update.release import AvailableUpdate


app = typer.Typer(
    no_args_is_help=True, help="Check for a newer version, install it, or return to the previous version."
)
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command()
def check(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Ask whether there is a newer version. Nothing is installed."""
    from neuroshard import __version__
    from neuroshard.update.checking import notice

    update = _look(_settings(data_dir))
    if as_json:
        found = {"version": update.version, "notes": update.notes, "bytes": update.artefact.size} if update else None
        typer.echo(json.dumps({"current": __version__, "available": found}))
    elif update is None:
        typer.echo(f"Version {__version__} is the newest.")
    else:
        typer.echo(notice(update.version))
        typer.echo(update.notes)


@app.command()
def apply(data_dir: DataDir = None, yes: Yes = False, as_json: AsJson = False) -> None:
    """Install the newer version: download and verify it, stop the node at a checkpoint, and start the new version.

    If the new version does not start, the old one runs again. Autostart and settings do not change.
    """
    from neuroshard import __version__
    from neuroshard.cli.update_node import LocalNode
    from neuroshard.update.applying import apply_update

    installation = _installation()
    settings = _settings(data_dir)
    update = _look(settings)
    if update is None:
        _print_change(f"Version {__version__} is the newest.", None, as_json=as_json)
        return
    if not as_json:
        typer.echo(f"Version {update.version} ({update.artefact.size / 1e6:,.0f} MB)\n{update.notes}")
    _confirm(f"Install it in place of {__version__}?", yes=yes)
    control = LocalNode(settings.data_dir, installation)
    progress = None if as_json else partial(_show_progress, sys.stderr.isatty())
    change = apply_update(update, installation, control, progress=progress, on_step=_print_step)
    _print_change(_words(change), change, as_json=as_json)


@app.command()
def rollback(data_dir: DataDir = None, yes: Yes = False, as_json: AsJson = False) -> None:
    """Return to the version before the last update."""
    from neuroshard.cli.update_node import LocalNode
    from neuroshard.update.applying import roll_back

    installation = _installation()
    settings = _settings(data_dir)
    before = installation.previous()
    if before is not None:
        _confirm(f"Return from {installation.current()} to {before}?", yes=yes)
    change = roll_back(installation, LocalNode(settings.data_dir, installation), on_step=_print_step)
    _print_change(_words(change), change, as_json=as_json)


def _settings(data_dir: Path | None) -> Settings:
    from neuroshard.config.loading import load_settings

    return load_settings(given(data_dir=data_dir), os.environ).settings


def _look(settings: Settings) -> AvailableUpdate | None:
    import anyio

    from neuroshard import __version__
    from neuroshard.update.checking import look_for_update

    return anyio.run(look_for_update, settings, __version__, time.time())


def _installation() -> Installation:
    """The installation of this program. Raises UsageError if the installer did not create it."""
    from neuroshard.config.folders import installation_root
    from neuroshard.errors import UsageError
    from neuroshard.update.installation import Installation

    root = installation_root()
    if root is None:
        raise UsageError(
            "This NeuroShard was not installed by its installer, so it cannot update itself.",
            "Update it with the program that installed it: apt install ./neuroshard_....deb, or pip install.",
        )
    return Installation(root)


def _confirm(question: str, *, yes: bool) -> None:
    if not yes and not typer.confirm(question):
        raise typer.Exit(1)


def _show_progress(is_terminal: bool, done: int, size: int) -> None:
    if is_terminal:
        sys.stderr.write(f"\rfetched {done / 1e6:,.0f} of {size / 1e6:,.0f} MB" + ("\n" if done == size else ""))


def _print_step(step: str) -> None:
    if step == "going back":  # it may take as long as a final checkpoint: the user should not press Ctrl+C again
        typer.echo("The previous version starts the node again.", err=True)


def _words(change: VersionChange) -> str:
    running = (
        "The node runs again, from its newest checkpoint." if change.was_running else "Start it with `neuroshard`."
    )
    return f"Version {change.after} has replaced {change.before}. {running} {change.note}".strip()


def _print_change(message: str, change: VersionChange | None, *, as_json: bool) -> None:
    if as_json:
        facts = {"before": change.before, "after": change.after, "was_running": change.was_running} if change else {}
        typer.echo(json.dumps({"message": message, **facts}))
    else:
        typer.echo(message)
