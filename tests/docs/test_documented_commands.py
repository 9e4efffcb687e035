"""Every block of commands in the documents, run as a reader would, on a node of its own."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from benchmarks import preloaded
from benchmarks.node_process import TOKEN, NodeProcess, running_node
from neuroshard.host.autostart import systemd_unit

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(
    r"(?:<!-- run: (?P<how>[^>]*?) -->\n)?^```(?:sh|bash|bat|powershell|console)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Commands that a reader types one after the other."""

    page: Path
    line: int
    text: str
    how: str  # what the comment says; empty without one

    @property
    def runs_until_stopped(self) -> bool:
        """Whether it ends with Ctrl+C only."""
        return self.how == "until Ctrl+C"

    @property
    def reason(self) -> str | None:
        """Why it is not run here; None when it is."""
        return self.how.removeprefix("not here, ") if self.how.startswith("not here, ") else None


def blocks_of(page: Path) -> list[Block]:
    """In the order of the page."""
    text = page.read_text(encoding="utf-8")
    found = _BLOCK.finditer(text)
    return [Block(page, text[: match.start("text")].count("\n"), match["text"], match["how"] or "") for match in found]


pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("bash") is None or shutil.which("curl") is None,
        reason="the documents speak of bash, curl and Linux' folders",
    ),
]
MOST_NOT_RUN = 13  # one of them for Windows
SECONDS_BEFORE_INTERRUPT = 2  # after the first output
FIRST_LINES = 3
LONGEST_SECONDS = 240.0
FOLLOWED = ROOT / "docs" / "ORGANISING.md"  # several people type its commands: see test_first_public_run.py
RUN_PAGES = [page for page in PAGES if page != FOLLOWED and any(block.reason is None for block in blocks_of(page))]


def environment_of(home: Path, token: str) -> dict[str, str]:
    """A person's environment: nothing opens a browser, nothing leaves this computer, and every node has a free port."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NEUROSHARD_", "XDG_"))}
    return kept | {
        "HOME": str(home),
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "NEUROSHARD_TOKEN": token,
        "NEUROSHARD_PORT": "0",
        "NEUROSHARD_P2P_HOST": "127.0.0.1",
        "NEUROSHARD_BROWSER": "false",
        "NEUROSHARD_CPU_THREADS": "1",
        "COLUMNS": "200",
    }


def install_program(home: Path, *, fresh: bool = False) -> None:
    """Put the command `neuroshard` into a person's path; a `fresh` one imports for itself, as it does for a user."""
    line = [sys.executable, "-m", "neuroshard"] if fresh else preloaded.program()
    program = home / "bin" / "neuroshard"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.join(line)} "$@"\n')
    program.chmod(0o755)


@dataclass
class Reader:
    """A user with a home folder, a wallet, texts and a running node in the default data folder."""

    home: Path
    node: NodeProcess
    start: Callable[[], NodeProcess]

    def ensure_running(self) -> None:
        """A block may have stopped the node; it may still be on its way."""
        try:
            is_up = self.node.get("/api/status")["state"] != "stopping"
        except httpx.HTTPError:
            is_up = False
        if not is_up:
            self.node.process.wait(60)
            self.node = self.start()

    def environment(self) -> dict[str, str]:
        """That of a person with the data of this page and no network."""
        own = {"NEUROSHARD_GENESIS": str(self.home / "genesis"), "NEUROSHARD_NETWORK": "false"}
        return environment_of(self.home, TOKEN) | own

    def script(self, block: Block) -> str:
        """What the shell is given; the port of the documents is that of the node, and their evening is today's."""
        text = block.text.replace("localhost:8000", f"localhost:{self.node.port}")
        return text.replace("2026-01-31T18:00:00", f"{datetime.now():%FT%T}")  # noqa: DTZ005 - as it is typed

    def read(self, block: Block, state: Path) -> subprocess.CompletedProcess[str]:
        """Run a block with the variables that earlier ones of its page left in `state`."""
        begin = f"set -euo pipefail; source {state}; cd {self.home / 'reading'}\n"
        end = f"\nset +u; declare -p AUTH SECRET 2>/dev/null > {state} || true"
        command = ["bash", "-c", begin + self.script(block) + ("" if block.runs_until_stopped else end)]
        if block.runs_until_stopped:
            return read_and_interrupt(command, self.environment())
        return subprocess.run(
            command,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )


def read_and_interrupt(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Press Ctrl+C at a terminal after the first lines, or some seconds after the first output."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else a shell's background jobs pass "ignored" on
    terminal, end = os.openpty()  # a table in place shows nothing until its end anywhere else
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=end, stderr=end, start_new_session=True
    ) as process:
        os.close(end)
        seen = read_terminal(terminal, LONGEST_SECONDS)
        deadline = time.monotonic() + SECONDS_BEFORE_INTERRUPT
        while process.poll() is None and seen.count(b"\n") < FIRST_LINES and (left := deadline - time.monotonic()) > 0:
            seen += read_terminal(terminal, left)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        while piece := read_terminal(terminal, LONGEST_SECONDS):
            seen += piece
        process.wait(LONGEST_SECONDS)
    os.close(terminal)
    return subprocess.CompletedProcess(command, process.returncode, seen.decode(), "")


def read_terminal(terminal: int, seconds: float) -> bytes:
    """The next output within this time; empty without any, and at the end."""
    if not select.select([terminal], [], [], seconds)[0]:
        return b""
    try:
        return os.read(terminal, 65536)
    except OSError:  # no process has the terminal open any more
        return b""


@pytest.fixture(scope="module")
def reader(
    small_genesis: Path, small_text: Path, saving_often: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reader]:
    home = tmp_path_factory.mktemp("reader")
    place = home / "reading"
    place.mkdir()
    install_program(home)
    shutil.copytree(small_text, place / "my-texts")
    shutil.copytree(small_genesis, place / "data")
    shutil.copytree(small_genesis, home / "genesis")  # the node's, since the pages build ./data anew
    shutil.copytree(ROOT / "docs", place / "docs")
    flags = ["--genesis", str(home / "genesis"), "--memory", "500", "--cpu-threads", "1", "--no-network"]
    folder = home / ".local" / "share" / "neuroshard"
    with ExitStack() as nodes:

        def start() -> NodeProcess:
            node = nodes.enter_context(running_node(folder, flags, variables=saving_often))
            node.wait_for("checkpoint", lambda status: status["checkpoints"]["last_saved_step"] is not None)
            node.post("/api/training/pause")
            return node

        yield Reader(home, start(), start)


@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_do_what_it_says(reader: Reader, page: Path, tmp_path: Path) -> None:
    state = tmp_path / "variables"
    state.touch()
    for block in blocks_of(page):
        if block.reason is not None:
            continue
        reader.ensure_running()
        ran = reader.read(block, state)
        fine = {0, 130, -signal.SIGINT} if block.runs_until_stopped else {0}
        told = f"{page.name}:{block.line}\n{block.text}\n{ran.stdout[-1500:]}\n{ran.stderr[-3000:]}"
        assert ran.returncode in fine, f"exit code {ran.returncode} of {told}"
        assert "Traceback" not in ran.stderr, told
        if "/api/shutdown" in block.text:
            reader.node.process.wait(LONGEST_SECONDS)  # it is answered before the node says that it is stopping
        if block.runs_until_stopped:
            assert ran.stdout.strip() or ran.stderr.strip(), f"nothing was shown: {told}"


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    left_out = [block for block in blocks if block.reason is not None]
    assert len(blocks) - len(left_out) >= 25
    assert len(left_out) <= MOST_NOT_RUN
    assert all(len(block.reason or "") > 20 for block in left_out)
    unknown = [block for block in blocks if block.how and not block.runs_until_stopped and block.reason is None]
    assert unknown == []


def test_every_page_is_in_the_index_and_every_link_leads_somewhere() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages - set(re.findall(r"\]\(([A-Z]+\.md)\)", index)) == set()
    broken = [
        f"{page.name}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert broken == []


def test_the_board_asks_only_for_metrics_that_a_node_has(reader: Reader) -> None:
    reader.ensure_running()
    board = json.loads((ROOT / "docs" / "grafana" / "neuroshard.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"neuroshard_[a-z_]+", query)}
    assert len(asked) > 20

    def are_all_there(_status: object) -> bool:  # a rate is absent until the node trains
        text = httpx.get(
            f"{reader.node.url}/metrics", headers=reader.node.authorised(), trust_env=False, timeout=20
        ).text
        return asked <= set(re.findall(r"^(neuroshard_[a-z_]+)", text, re.MULTILINE))

    reader.node.post("/api/training/resume")  # a page may have paused it
    reader.node.wait_for("every metric of the board", are_all_there)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_unit_is_the_one_that_autostart_writes() -> None:
    unit = (ROOT / "docs" / "systemd" / "neuroshard.service").read_text(encoding="utf-8")
    start = "%h/.venv/bin/neuroshard --headless --token-file %h/.config/neuroshard/token"
    assert unit == systemd_unit(("PROGRAM",)).replace('"PROGRAM"', start)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (ROOT / "docs" / "systemd" / "neuroshard.service").read_text(encoding="utf-8")
    (tmp_path / "neuroshard.service").write_text(unit.replace("%h/.venv/bin/neuroshard", "/bin/true"))
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(tmp_path / "neuroshard.service")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "neuroshard.service" not in ran.stderr


def test_the_log_is_one_object_a_line_when_asked(reader: Reader, tmp_path: Path) -> None:
    command = "neuroshard --headless --log-json --no-training --data-dir ./logging\n"
    (tmp_path / "variables").touch()
    ran = reader.read(Block(PAGES[0], 0, command, "until Ctrl+C"), tmp_path / "variables")
    lines = [json.loads(line) for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    assert len(lines) >= 2  # that it starts, and that it was stopped
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
