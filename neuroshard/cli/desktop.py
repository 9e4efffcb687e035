"""Commands for the owner's computer: `autostart`, `tray` and `folders`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer

from neuroshard.cli.options import AsJson, DataDir, TokenFile, given
from neuroshard.cli.remote import DemoNode

if TYPE_CHECKING:
    from neuroshard.cli.tray_view import Mood, TrayNode
    from neuroshard.host.autostart import AutostartStatus


AUTOSTART_REMEDY = "`neuroshard autostart on` writes it again, `neuroshard autostart off` removes it."
autostart_app = typer.Typer(help="Start a node at every login.", no_args_is_help=True)


@autostart_app.command("on")
def on(
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Start a headless node at every login, with the stored token and settings. No node is started now."""
    from neuroshard.config.loading import load_settings
    from neuroshard.host.autostart import places_of_this_computer, start_command, turn_on

    loaded = load_settings(given(token_file=token_file, data_dir=data_dir), os.environ)
    command = start_command(loaded)
    _print_autostart(turn_on(places_of_this_computer(os.environ), command), as_json=as_json)


@autostart_app.command("off")
def off(as_json: AsJson = False) -> None:
    """Remove everything that `autostart on` wrote. A running node is not stopped."""
    from neuroshard.host.autostart import places_of_this_computer, turn_off

    _print_autostart(turn_off(places_of_this_computer(os.environ)), as_json=as_json)


@autostart_app.command("status")
def show_autostart(as_json: AsJson = False) -> None:
    """Show whether a node starts at login, and the file or registry key that starts it."""
    from neuroshard.host.autostart import places_of_this_computer, read_autostart

    _print_autostart(read_autostart(places_of_this_computer(os.environ)), as_json=as_json)


def _print_autostart(found: AutostartStatus, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    elif found.is_on:
        typer.echo(f"Autostart is on: {found.kind} {found.path}")
        if found.missing:
            typer.echo(f"{found.complaint()} {AUTOSTART_REMEDY}", err=True)
    else:
        typer.echo(f"Autostart is off. `neuroshard autostart on` would write the {found.kind} {found.path}")


LOOK_SECONDS = 3.0
ICON_PIXELS = 64


def tray(data_dir: DataDir = None, demo: DemoNode = False) -> None:
    """Show an icon next to the clock, with the node's state and a menu: dashboard, pause, resume.

    Closing the icon does not stop the node.
    """
    from neuroshard.cli.tray_view import TrayNode

    run_icon(TrayNode(data_dir, demo=demo))


def run_icon(node: TrayNode) -> None:
    """Show the icon until it is closed. Raises UsageError without a desktop or the icon's library."""
    _icon(node).run(setup=partial(_keep_current, node))


def _icon(node: TrayNode) -> Any:
    """Make the icon and its menu. Raises UsageError.

    The menu shows the state from the last poll: a request to the node while the menu opens would freeze the icon.
    """
    pystray = _library()
    view = node.look()

    def title(_item: Any) -> str:
        return node.seen.title

    def may_pause(_item: Any) -> bool:
        return node.seen.may_pause

    def may_resume(_item: Any) -> bool:
        return node.seen.may_resume

    def close(icon: Any) -> None:
        icon.stop()

    entries = (
        pystray.MenuItem(title, None, enabled=False),
        pystray.MenuItem("Open dashboard", _reporting(node.open_dashboard), default=True),
        pystray.MenuItem("Pause for an hour", _reporting(node.pause_an_hour), enabled=may_pause),
        pystray.MenuItem("Resume", _reporting(node.resume), enabled=may_resume),
        pystray.MenuItem("Close this icon", close),
    )
    return pystray.Icon("neuroshard", icon=picture(view.mood), title=view.title, menu=pystray.Menu(*entries))


def _reporting(act: Callable[[], str]) -> Callable[[Any], None]:
    """Make a menu handler that calls `act` and shows the returned text as a notification, where the desktop can."""

    def on_click(icon: Any) -> None:
        words = act()
        if words and icon.HAS_NOTIFICATION:
            icon.notify(words, "NeuroShard")

    return on_click


def picture(mood: Mood) -> Any:
    """Draw NeuroShard's logo in the colour of a mood, ICON_PIXELS wide and high."""
    from PIL import Image, ImageDraw

    size = ICON_PIXELS
    image = Image.new("RGBA", (size, size))
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((0, 0, size - 1, size - 1), radius=size // 4, fill=mood.value)
    left, right, top, bottom = size // 4, size * 3 // 4, size * 5 // 16, size * 11 // 16
    draw.line([(left, bottom), (left, top), (right, bottom), (right, top)], fill="white", width=size // 10)
    for x, y in ((left, top), (right, bottom)):
        draw.ellipse((x - size // 12, y - size // 12, x + size // 12, y + size // 12), fill="white")
    return image


def _keep_current(node: TrayNode, icon: Any) -> None:
    """Poll the node and update the icon while it is visible. It runs in a thread of the icon's library."""
    icon.visible = True
    shown = node.look()
    while icon.visible:
        view = node.look()
        if view != shown:
            shown, icon.title, icon.icon = view, view.title, picture(view.mood)
            icon.update_menu()
        time.sleep(LOOK_SECONDS)


def _library() -> Any:
    """Import pystray. Raises UsageError without a desktop, which pystray needs at its import, or without pystray."""
    from neuroshard.errors import UsageError

    has_desktop = sys.platform in {"win32", "darwin"} or os.environ.get("DISPLAY")
    if not has_desktop:
        raise UsageError(
            "The icon needs a desktop, and this session has none.", "Run the command in a desktop session."
        )
    try:
        return import_module("pystray")
    except ImportError as error:
        raise UsageError(f"The icon's library is missing: {error}.", "pip install 'neuroshard[tray]'") from error


def folders(as_json: AsJson = False) -> None:
    """Print the folders of your keys, settings and checkpoints, one per line. They may not exist yet."""
    from neuroshard.config.folders import data_folders

    found = [str(folder) for folder in data_folders()]
    typer.echo(json.dumps({"folders": found}) if as_json else "\n".join(found))
