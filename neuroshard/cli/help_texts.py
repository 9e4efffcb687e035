"""How `--help` reads: switches show no type to give, and paragraphs wrap where the terminal does."""

from __future__ import annotations

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

HELP_NAMES = ["-h", "--help"]


def command_of(app: typer.Typer) -> TyperCommand | TyperGroup:
    """The command line of an application, with help texts in order."""
    command = typer.main.get_command(app)  # unlike get_group it brings the options of completion
    assert isinstance(command, TyperCommand | TyperGroup)
    _put_in_order(command)
    return command


def _put_in_order(command: TyperCommand | TyperGroup) -> None:
    command.help = None if command.help is None else _wrapped(command.help)
    # asked for once, the option of --help is kept by its command
    for option in [*command.params, command.get_help_option(typer.Context(command, help_option_names=HELP_NAMES))]:
        if isinstance(option, TyperOption) and option.is_flag and option.metavar is None:
            option.metavar = ""  # else <bool>, and people type `--headless true`
    if isinstance(command, TyperGroup):
        for part in command.commands.values():
            if isinstance(part, TyperCommand | TyperGroup):
                _put_in_order(part)


def _wrapped(text: str) -> str:
    """Each paragraph in one line: the terminal breaks it, not the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
