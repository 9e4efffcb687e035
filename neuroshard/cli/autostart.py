"""`neuroshard autostart`: start with the computer, or not. Nothing else ever switches it on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from neuroshard.cli.options import AsJson, DataDir, TokenFile, given

if TYPE_CHECKING:
    from neuroshard.node.autostart import AutostartStatus

MEND = "`neuroshard autostart on` writes it anew, `neuroshard autostart off` removes it."
app = typer.Typer(help="Start with the computer, or not.", no_args_is_help=True)


@app.command("on")
def on(
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Start a headless node at every login, with the stored token and settings. Starts nothing now."""
    from neuroshard.config.loading import load_settings
    from neuroshard.node.autostart import places_of_this_computer, start_command, turn_on

    loaded = load_settings(given(token_file=token_file, data_dir=data_dir), os.environ)
    command = start_command(loaded)
    _tell(turn_on(places_of_this_computer(os.environ), command), as_json=as_json)


@app.command("off")
def off(as_json: AsJson = False) -> None:
    """Remove everything that `on` wrote. A node that runs goes on."""
    from neuroshard.node.autostart import places_of_this_computer, turn_off

    _tell(turn_off(places_of_this_computer(os.environ)), as_json=as_json)


@app.command("status")
def status(as_json: AsJson = False) -> None:
    """Tell whether a node starts at login, and which file or registry key does it."""
    from neuroshard.node.autostart import places_of_this_computer
    from neuroshard.node.autostart import status as autostart_status

    _tell(autostart_status(places_of_this_computer(os.environ)), as_json=as_json)


def _tell(found: AutostartStatus, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    elif found.is_on:
        typer.echo(f"Autostart is on: {found.kind} {found.path}")
        if found.missing:
            typer.echo(f"{found.complaint()} {MEND}", err=True)
    else:
        typer.echo(f"Autostart is off. `neuroshard autostart on` would write the {found.kind} {found.path}")
