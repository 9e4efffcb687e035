"""`logs -f` and `status --watch` beside a node that is started again, and the completion of the shell."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Queue

import pytest
from rich.console import Console

from benchmarks.node_process import NodeProcess, running_node
from neuroshard.cli.client import shown
from tests.worlds.commands import Command

pytestmark = pytest.mark.process
LONGEST_SECONDS = 60.0


@pytest.fixture
def followers(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Commands that never end by themselves."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.terminate()
        process.wait(LONGEST_SECONDS)


def lines_of(command: Command, folder: Path, *words: str, started: list[subprocess.Popen[str]]) -> Queue[str]:
    """What a command that goes on prints on a terminal, as it comes."""
    command.home.mkdir(exist_ok=True)
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        command.arguments(*words, "--data-dir", folder),
        env=command.environment() | {"TERM": "xterm", "COLUMNS": "300", "LINES": "80"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    started.append(process)
    lines: Queue[str] = Queue()
    threading.Thread(target=read_terminal, args=(ours, lines), daemon=True).start()
    return lines


def read_terminal(descriptor: int, lines: Queue[str]) -> None:
    """Until the program at the other end is gone, which Linux tells as an error."""
    with os.fdopen(descriptor, "rb") as terminal, suppress(OSError):
        for line in terminal:
            lines.put(line.decode(errors="replace").strip())


def wait_for_line(lines: Queue[str], text: str) -> list[str]:
    """All lines up to one with this text."""
    seen = list[str]()
    while not seen or text not in seen[-1]:
        seen.append(lines.get(timeout=LONGEST_SECONDS))
    return seen


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal is made with openpty")
def test_both_go_on_when_the_node_is_started_again(
    neuroshard: Command, quick: list[str], tmp_path: Path, followers: list[subprocess.Popen[str]]
) -> None:
    folder = tmp_path / "node"
    with running_node(folder, [*quick, "--no-training"]) as first:
        rest(first)
        logs = lines_of(neuroshard, folder, "logs", "-f", "--json", started=followers)
        shown = lines_of(neuroshard, folder, "status", "--watch", started=followers)
        before = wait_for_line(logs, f"http://localhost:{first.port}")
        node_id = first.get("/api/status")["node_id"]
        wait_for_line(shown, node_id)
        assert first.stop() == 0
        wait_for_line(logs, "The node does not answer; waiting for it.")
        wait_for_line(shown, "The node does not answer; waiting for it.")
    with running_node(folder, [*quick, "--no-training"]) as second:
        rest(second)
        after = wait_for_line(logs, f"http://localhost:{second.port}")
        wait_for_line(shown, "paused")
        numbers = [json.loads(line)["sequence"] for line in after if line.startswith("{")]
        assert numbers[0] == 1  # nothing of its beginning is missed
    told = [json.loads(line)["sequence"] for line in before if line.startswith("{")]
    assert told == sorted(set(told))


def rest(node: NodeProcess) -> None:
    node.wait_for("rest", lambda status: status["state"] == "paused")


def test_watching_is_for_people(neuroshard: Command, tmp_path: Path) -> None:
    assert neuroshard("status", "--watch", "--json").code == 2
    assert neuroshard("status", "--watch", "--data-dir", tmp_path).code == 4  # nothing to begin with


@pytest.mark.skipif(sys.platform == "win32", reason="bash completes on Linux and macOS")
def test_bash_completes_commands_and_options(neuroshard: Command) -> None:
    """The script that `--show-completion` prints asks the program in this way."""
    script = neuroshard.having(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")("--show-completion", "bash")
    assert script.code == 0, script.err
    assert "complete -o default -F _neuroshard_completion neuroshard" in script.out
    program = "from neuroshard.cli.main import main; main()"

    def completed(line: str) -> set[str]:
        words = line.split(" ")
        asked = {"_NEUROSHARD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | neuroshard.environment() | asked,
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
        )
        return set(ran.stdout.split())

    assert {"status", "stop"} <= completed("neuroshard st")
    assert {"export", "list", "verify", "restore"} <= completed("neuroshard checkpoint ")
    assert "--follow" in completed("neuroshard logs --f")


def test_the_last_words_of_a_silent_node_keep_their_rows_and_only_the_news_is_red() -> None:
    screen = io.StringIO()
    Console(file=screen, force_terminal=True, color_system="standard", width=50).print(shown(["x" * 90], answers=False))
    news, last = screen.getvalue().splitlines()
    assert ("does not answer" in news, "31m" in news) == (True, True)
    assert ("x" * 49 in last, "31m" in last) == (True, False)
