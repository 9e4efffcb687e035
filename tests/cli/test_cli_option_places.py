from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from neuroshard.api.setup import FIELDS
from neuroshard.cli.client import NodeRefusedError
from neuroshard.cli.failures import ExitCode, exit_code
from neuroshard.cli.main import app
from neuroshard.cli.options import settings_given
from neuroshard.cli.remote import log_line
from neuroshard.cli.talk import _text_of
from neuroshard.config.settings import Applies, Settings, note_of
from neuroshard.errors import CheckpointError, DataUnavailableError, NetworkRefusedError, TokenError, UsageError

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--memory", "900", "demo"], "--memory"),
        (["--data-dir", "elsewhere", "status"], "--data-dir"),
        (["--genesis", "folder", "doctor"], "--genesis"),
        (["--no-training", "demo"], "--no-training"),
        (["--run", "0" * 64, "status"], "--run"),
        (["--peer", "x", "--peer", "y", "doctor"], "--peer"),
    ],
)
def test_an_option_before_a_command_is_refused_instead_of_lost(arguments: list[str], option: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UsageError)
    assert option in result.exception.message
    assert f"neuroshard {arguments[-1]} {option}" in result.exception.action


def test_flags_become_the_settings_of_their_names() -> None:
    nothing = {"port": None, "peer": None, "no_network": False, "verbose": False}
    assert settings_given(nothing) == {}
    assert settings_given({"peer": [], "p2p_port": 0, "port": 0}) == {"p2p_port": 0, "port": 0}
    assert settings_given({"genesis_source": "data", "run_id": "ab", "peer": ["x", "y"], "verbose": True}) == {
        "genesis": "data",
        "run": "ab",
        "peer": ["x", "y"],
        "verbose": True,
    }
    switches = ("no_network", "no_lan_discovery", "no_port_mapping", "no_relay", "no_training", "headless")
    assert settings_given(dict.fromkeys(switches, True)) == dict.fromkeys(
        ("network", "lan_discovery", "port_mapping", "relay", "training", "browser"), False
    )


def test_every_parameter_of_a_node_is_a_setting() -> None:
    command = get_command(app)
    shown = {item.name: ["x"] if item.name == "peer" else True for item in command.params if item.expose_value}
    no_settings = {None, "version", "end_with_stdin"}
    names = settings_given({name: value for name, value in shown.items() if name not in no_settings})
    assert names.keys() <= Settings.model_fields.keys()
    without_flag = Settings.model_fields.keys() - names.keys()
    assert {"max_checkpoint_storage", "update_check"} <= without_flag
    # what no flag can say, config.toml can: nothing is out of reach
    assert [name for name in without_flag if note_of(name).applies is Applies.NOT_STORED] == []
    # a flag sets what the wizard asks for, apart from the settings that only a preset chooses
    assert set(FIELDS) - names.keys() == {"cpu_percent", "upload_percent", "pause_on_battery", "pause_on_full_screen"}


def test_a_demo_takes_the_options_of_a_node_in_the_same_words() -> None:
    node = get_command(app)
    assert isinstance(node, TyperGroup)
    words = [
        {item.name: (item.opts, getattr(item, "help", None)) for item in command.params}
        for command in (node, node.commands["demo"])
    ]
    both = words[0].keys() & words[1].keys()
    assert {"inner_steps", "max_storage", "no_training", "memory", "port"} <= both
    assert [name for name in both if words[0][name] != words[1][name]] == []


@pytest.mark.parametrize(
    "words",
    [
        *(["status"], ["pause"], ["resume"], ["stop"], ["logs"], ["generate"], ["doctor"], ["wallet", "show"]),
        *(["checkpoint", name] for name in ("list", "verify", "export", "restore")),
    ],
)
def test_what_a_command_tells_can_be_had_as_json(words: list[str]) -> None:
    command = get_command(app)
    for word in words:
        assert isinstance(command, TyperGroup)
        command = command.commands[word]
    assert "--json" in {name for item in command.params for name in item.opts}


def test_the_documented_exit_codes_are_those_that_there_are() -> None:
    table = README.read_text(encoding="utf-8").split("| exit code |")[1].split("\n\n")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == list(ExitCode)
    shown = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert (
        "Exit codes: 0 clean, 1 refused, 2 usage, 3 token, 4 network, 5 storage, 6 data, 7 restart, 130 stopped."
        in shown
    )


def test_every_kind_of_error_has_its_exit_code() -> None:
    kinds = (NodeRefusedError, UsageError, TokenError, NetworkRefusedError, CheckpointError, DataUnavailableError)
    assert [exit_code(kind("it")) for kind in kinds] == [1, 2, 3, 4, 5, 6]


def test_log_lines_tell_the_time_in_words() -> None:
    line = log_line({"time": 1_700_000_000.25, "level": "INFO", "message": "hello"})
    assert line.startswith("2023-11-1")
    assert line.endswith(" INFO    hello")


def test_an_error_in_the_middle_of_a_text_is_told() -> None:
    assert _text_of('data: {"choices": [{"text": "word"}]}') == "word"
    assert _text_of('data: {"choices": [{"delta": {"role": null, "content": "word"}}]}') == "word"
    assert _text_of("data: [DONE]") == ""
    with pytest.raises(NodeRefusedError, match="stopping"):
        _text_of('data: {"error": {"message": "The node is stopping."}}')
