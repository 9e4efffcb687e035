"""What a mistake leads to: an exit code that a script can read, and words that a person can act on."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.node_process import TOKEN
from neuroshard import __version__
from neuroshard.config.folders import NodePaths
from tests.worlds.commands import Command

pytestmark = pytest.mark.process
GOOD_PHRASE = "legal winner thank year wave sausage worth useful legal winner thank yellow"
HEAVY = {"torch", "numpy", "fastapi", "uvicorn", "trio", "httpx", "cryptography"}


def test_the_version_is_printed(neuroshard: Command) -> None:
    outcome = replace(neuroshard, fresh=True)("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"neuroshard {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments", [("--help",), ("-h",), ("demo", "--help"), ("checkpoint", "--help"), ("run", "create", "-h")]
)
def test_help_imports_nothing_heavy(neuroshard: Command, arguments: tuple[str, ...]) -> None:
    command = neuroshard.arguments(*arguments)
    ran = subprocess.run(
        [command[0], "-X", "importtime", *command[1:]],
        env=neuroshard.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0
    assert "Usage: neuroshard" in ran.stdout
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in ran.stderr.splitlines()}
    assert "typer" in imported
    assert imported & HEAVY == set()


def test_help_offers_no_value_for_a_switch_and_wraps_where_the_terminal_does(neuroshard: Command) -> None:
    shown = neuroshard.having(COLUMNS="120")("trainer", "--help").out
    assert "bool" not in shown
    lines = [line.strip() for line in shown.splitlines()]
    first = next(index for index, line in enumerate(lines) if line.startswith("A run can have any number"))
    assert all(len(line) > 90 for line in lines[first : lines.index("", first) - 1])


def test_help_names_the_commands_that_exist_and_no_others(neuroshard: Command) -> None:
    shown = neuroshard("--help").out
    built = [
        "demo",
        "status",
        "pause",
        "resume",
        "stop",
        "logs",
        "doctor",
        "wallet",
        "checkpoint",
        "generate",
        "genesis",
        "run",
        "seed",
        "trainer",
    ]
    assert [name for name in built if f"│ {name} " not in shown] == []
    assert [name for name in ("authorizer", "monitor") if f"│ {name} " in shown] == []


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (("--memroy", "500"), "--memory"),
        (("demo", "--step", "3"), "--steps"),
        (("statsu",), "status"),
        (("--port", "70000"), "0 to 65535"),
        (("--device", "gpu"), "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"),
        (("--device", "cuda:x"), "where N counts from 0"),
        (("--device", "cuda:-1"), "where N counts from 0"),
        (("--genesis", "ftp://example.org"), "https://"),
        (("--run", "0123abcd"), "64 hex digits"),
        (("--peer", "192.0.2.1:4001"), "does not start with /ip4/"),
        (("--max-upload", "0"), "more than 0"),
        (("--port", "9000", "status"), "status --port"),
    ],
)
def test_a_wrong_command_line_is_2_and_says_what_is_right(
    neuroshard: Command, arguments: tuple[str, ...], suggestion: str
) -> None:
    outcome = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)(*arguments)
    assert outcome.code == 2
    assert suggestion in outcome.err
    assert "Traceback" not in outcome.err


def test_an_unknown_variable_is_2_and_names_the_nearest(neuroshard: Command) -> None:
    outcome = neuroshard.having(NEUROSHARD_TOKEN=TOKEN, NEUROSHARD_MEMROY="500")()
    assert outcome.code == 2
    assert "NEUROSHARD_MEMROY" in outcome.err
    assert "Did you mean memory?" in outcome.err


def test_an_unknown_key_of_the_file_is_2_and_names_the_nearest(neuroshard: Command, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('prot = 9000\ngenesis = "somewhere"\n')
    outcome = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)("--data-dir", tmp_path)
    assert outcome.code == 2
    assert "prot" in outcome.err
    assert str(tmp_path / "config.toml") in outcome.err
    assert "Did you mean port?" in outcome.err


def test_no_token_is_3_and_says_where_to_get_one(neuroshard: Command, tmp_path: Path) -> None:
    outcome = neuroshard("--data-dir", tmp_path / "node")
    assert outcome.code == 3
    assert "NEUROSHARD_TOKEN" in outcome.err
    assert "neuroshard wallet new" in outcome.err
    assert not (tmp_path / "node").exists()


def test_an_empty_token_is_3(neuroshard: Command, tmp_path: Path) -> None:
    outcome = neuroshard.having(NEUROSHARD_TOKEN="  ")("--data-dir", tmp_path)
    assert outcome.code == 3
    assert "empty" in outcome.err


def test_a_phrase_with_a_wrong_word_is_3_and_is_not_repeated(neuroshard: Command, tmp_path: Path) -> None:
    wrong = GOOD_PHRASE.replace("yellow", "zebra")
    outcome = neuroshard.having(NEUROSHARD_TOKEN=wrong)("--data-dir", tmp_path)
    assert outcome.code == 3
    assert "checksum" in outcome.err
    assert wrong not in outcome.err


def test_an_option_in_place_of_the_token_is_2(neuroshard: Command, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("--verbose\n")
    folder = ("--data-dir", tmp_path / "node", "--headless")
    for outcome in (
        neuroshard(*folder, "--token", "--help"),
        neuroshard(*folder, "--token=-v"),
        neuroshard(*folder, "--token-file", tmp_path / "token"),
        neuroshard("wallet", "show", "--token", "--json"),
        neuroshard.having(NEUROSHARD_TOKEN="-x")(*folder),
    ):
        assert outcome.code == 2, outcome.err
        assert "begins with -, as an option does" in outcome.err
    assert not (tmp_path / "node").exists()


def test_an_unreadable_token_file_is_3(neuroshard: Command, tmp_path: Path) -> None:
    outcome = neuroshard("--data-dir", tmp_path, "--token-file", tmp_path / "nowhere")
    assert outcome.code == 3
    assert str(tmp_path / "nowhere") in outcome.err


def test_a_busy_port_is_4_and_names_it(neuroshard: Command, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        outcome = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)("--data-dir", tmp_path, "--port", port, "--headless")
    assert outcome.code == 4
    assert f"Port {port} on 127.0.0.1 is busy." in outcome.err
    assert "--port" in outcome.err


def test_a_command_without_a_node_is_4(neuroshard: Command, tmp_path: Path) -> None:
    outcome = neuroshard("status", "--data-dir", tmp_path)
    assert outcome.code == 4
    assert str(tmp_path) in outcome.err
    assert outcome.out == ""


def test_a_port_of_a_node_in_another_folder_is_2_and_names_both_ways_to_find_it(
    neuroshard: Command, tmp_path: Path
) -> None:
    outcome = neuroshard("status", "--data-dir", tmp_path, "--port", 8701)
    assert outcome.code == 2
    assert "Name the node's folder with --data-dir. For a demo, add --demo." in " ".join(outcome.err.split())


def test_a_file_in_place_of_the_data_folder_is_5(neuroshard: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    folder = tmp_path / "file" / "node"
    outcome = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)("--data-dir", folder, "--headless")
    assert outcome.code == 5
    assert str(folder) in outcome.err
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_genesis_folder_that_is_not_there_is_6(neuroshard: Command, tmp_path: Path) -> None:
    genesis = tmp_path / "genesis"
    arguments = ("--data-dir", tmp_path / "node", "--genesis", genesis, "--headless", "--port", 0)
    outcome = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)(*arguments)
    assert outcome.code == 6
    assert str(genesis) in outcome.err
    assert "--genesis" in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.err.count(str(genesis)) == 1  # said once to the person,
    assert (
        f"ERROR neuroshard.node.launch: The node ended: There is no Genesis folder {genesis}"
        in (tmp_path / "node" / "logs" / "node.log").read_text()
    )  # and kept for whoever looks later


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("status", "--data-dir", "~nobody-of-this-name/x"), 2, "The home folder in ~nobody-of-this-name/x"),
        (("checkpoint", "list", "--data-dir", "/" + "a" * 5_000), 5, "aaa cannot be used: "),
        (("pause", "--for", "nan"), 2, "A pause cannot last nan seconds."),
        (("pause", "--for", "700000"), 2, "(a week)"),
        (("genesis", "verify", "http://[half"), 2, "http://[half is not an address"),
        (("genesis", "verify", "file:///x"), 2, "file:///x is not a place to read from."),
        (("--genesis", "http://[half", "--token", "x", "--headless"), 2, "genesis (from --genesis) cannot be"),
    ],
)
def test_names_that_lead_nowhere_are_told_without_a_trace(
    neuroshard: Command, arguments: tuple[str, ...], code: int, words: str
) -> None:
    outcome = neuroshard(*arguments)
    assert (outcome.code, "Traceback" in outcome.err) == (code, False), outcome.err
    assert words in outcome.err
    assert len(outcome.err) < 1_000


@pytest.mark.parametrize("command", [("--headless",), ("trainer", "--headless"), ("seed",)])
def test_peers_come_from_the_environment_when_no_flag_names_any(neuroshard: Command, command: tuple[str, ...]) -> None:
    outcome = neuroshard.having(NEUROSHARD_PEER="nowhere", NEUROSHARD_TOKEN=TOKEN)(*command)
    assert (outcome.code, "peer (from NEUROSHARD_PEER) cannot be" in outcome.err) == (2, True), outcome.err


def test_too_little_memory_is_2_and_says_how_much_is_needed(neuroshard: Command, tmp_path: Path) -> None:
    """Told before the data come: nobody should wait for a download to learn that it was in vain."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        arguments = ("--data-dir", tmp_path / "node", "--genesis", address, "--headless", "--port", 0)
        outcome = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)(*arguments, "--memory", 100)
    assert outcome.code == 2
    assert "500 MB" in outcome.err
    assert "--memory" in outcome.err


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "xpu:1", "mps"])
def test_a_device_that_is_not_there_is_2_before_the_node_has_an_identity(
    neuroshard: Command, tmp_path: Path, small_genesis: Path, device: str
) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("this computer has an accelerator")
    arguments = ("--data-dir", tmp_path / "node", "--genesis", small_genesis, "--headless", "--port", 0)
    outcome = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)(*arguments, "--device", device)
    assert outcome.code == 2
    assert f"The device {device} cannot be used: " in outcome.err
    assert "This computer has: cpu." in outcome.err
    assert "Traceback" not in outcome.err
    assert not NodePaths.below(tmp_path / "node").node_key.exists()
