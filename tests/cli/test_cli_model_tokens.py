"""`neuroshard token model`, `list` and `remove`, without a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from neuroshard.api.model_tokens import ModelTokens
from neuroshard.cli.main import app
from neuroshard.errors import ConflictError, UsageError


def test_a_token_is_made_listed_and_removed(tmp_path: Path) -> None:
    place = ["--data-dir", str(tmp_path)]
    made = CliRunner().invoke(app, ["token", "model", "openai", *place])
    token = made.stdout.strip()
    assert ModelTokens(tmp_path).accepts(token)
    listed = CliRunner().invoke(app, ["token", "list", *place])
    assert listed.stdout.split()[1:] == ["openai"]
    assert token not in listed.stdout
    rows = json.loads(CliRunner().invoke(app, ["token", "list", "--json", *place]).stdout)
    assert [row["name"] for row in rows] == ["openai"]
    again = CliRunner().invoke(app, ["token", "model", "openai", *place])
    assert isinstance(again.exception, ConflictError)
    removed = CliRunner().invoke(app, ["token", "remove", "openai", *place])
    assert removed.stdout == "The token openai is removed.\n"
    assert not ModelTokens(tmp_path).accepts(token)
    with pytest.raises(UsageError, match="No token has this name"):
        CliRunner().invoke(app, ["token", "remove", "openai", *place], catch_exceptions=False)
