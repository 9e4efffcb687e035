"""Commands that compute nothing do not load PyTorch, which takes seconds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.node_process import TOKEN
from tests.worlds.commands import Command

pytestmark = pytest.mark.process

# Runs the command of the arguments and exits as it does, but with 99 when PyTorch was loaded on the way.
PROGRAM = """
import sys
from neuroshard.cli.main import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
sys.exit(99 if "torch" in sys.modules else code)
"""


def run_without_torch(owner: Command, *arguments: object, code: int = 0) -> str:
    """What the command printed; it must end with this code and without PyTorch."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env=owner.environment(),
        capture_output=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert ran.returncode == code, (ran.returncode, ran.stderr.decode())
    return ran.stdout.decode()


@pytest.fixture
def owner(neuroshard: Command) -> Command:
    """The command with a token."""
    neuroshard.home.mkdir()
    return neuroshard.having(NEUROSHARD_TOKEN=TOKEN)


def test_a_run_is_made_changed_and_published(owner: Command, small_genesis: Path, tmp_path: Path) -> None:
    genesis = shutil.copytree(small_genesis, tmp_path / "genesis")
    (tmp_path / "run.toml").write_text('name = "friends"\narchitecture = { depth = 2, sequence_length = 64 }\n')
    (tmp_path / "later.toml").write_text("inner_lr = 1e-4\nholds_from_outer_step = 3\n")
    file = tmp_path / "signed.json"
    create = ("run", "create", "--out", file, "--genesis", genesis, "--config")
    assert "Signed: run" in run_without_torch(owner, *create, tmp_path / "run.toml")
    assert "version 2" in run_without_torch(owner, *create, tmp_path / "later.toml", "--update", file)
    assert "is now the default run" in run_without_torch(owner, "run", "publish", file, "--genesis", genesis)
    assert "version    2" in run_without_torch(owner, "run", "show", file)


def test_states_are_listed_and_gone_back_to(owner: Command, trained_folder: Path, tmp_path: Path) -> None:
    node = shutil.copytree(trained_folder, tmp_path / "node")
    assert "step" in run_without_torch(owner, "checkpoint", "list", "--data-dir", node)
    for command in ("list", "verify"):
        shown = run_without_torch(owner, "checkpoint", command, "--data-dir", tmp_path / "new")
        assert f"No checkpoints yet in {tmp_path / 'new'}." in shown
    restore = ("checkpoint", "restore", "--at", "2999-01-01", "--data-dir", node)
    assert "resumes from step" in run_without_torch(owner, *restore)


@pytest.mark.parametrize("command", [["status"], ["open"], ["stop"], ["pause"], ["logs"], ["generate", "x"]])
def test_nobody_waits_to_hear_that_no_node_runs(owner: Command, command: list[str]) -> None:
    assert run_without_torch(owner, *command, code=4) == ""


def test_data_are_built_and_verified(owner: Command, small_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "genesis"
    assert "Built" in run_without_torch(owner, "genesis", "build", "--text", small_text, "--out", out)
    assert "shards checked" in run_without_torch(owner, "genesis", "verify", out)
