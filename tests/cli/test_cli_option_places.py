from __future__ import annotations

import pytest
from typer.testing import CliRunner

from neuroshard.cli.client import RequestRefusedError
from neuroshard.cli.main import app
from neuroshard.cli.remote import log_line
from neuroshard.cli.text import _text_of  # pyright: ignore[reportPrivateUsage]
from neuroshard.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--memory", "900", "demo"], "--memory"),
        (["--data-dir", "elsewhere", "status"], "--data-dir"),
        (["--genesis", "folder", "doctor"], "--genesis"),
        (["--no-training", "demo"], "--no-training"),
    ],
)
def test_an_option_before_a_command_is_refused_instead_of_lost(arguments: list[str], option: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UsageError)
    assert option in result.exception.message
    assert f"neuroshard {arguments[-1]} {option}" in result.exception.action


def test_log_lines_tell_the_time_in_words() -> None:
    line = log_line({"time": 1_700_000_000.25, "level": "INFO", "message": "hello"})
    assert line.startswith("2023-11-1")
    assert line.endswith(" INFO    hello")


def test_an_error_in_the_middle_of_a_text_is_told() -> None:
    assert _text_of('data: {"choices": [{"text": "word"}]}') == "word"
    assert _text_of("data: [DONE]") == ""
    with pytest.raises(RequestRefusedError, match="stopping"):
        _text_of('data: {"error": {"message": "The node is stopping."}}')
