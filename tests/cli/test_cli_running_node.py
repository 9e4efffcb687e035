"""Commands for a node that runs, and what of its secrets can be seen while it does."""

from __future__ import annotations

import json
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from benchmarks.node_process import NodeProcess, free_port, running_node
from neuroshard.cli import doctor as doctor_network
from neuroshard.cli.doctor import Case
from neuroshard.config.loading import load_settings
from neuroshard.identity import Wallet, parse_token
from tests.worlds.commands import Command

pytestmark = pytest.mark.process
SECRET_TOKEN = "an opaque token that nobody else may read 4711"


@pytest.fixture(scope="module")
def node(
    quick: list[str], saving_often: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeProcess]:
    """A node that the tests of this module talk to; it rests unless a test wants it to train. Its token was a flag."""
    folder = tmp_path_factory.mktemp("running") / "node"
    with running_node(folder, [*quick, "--token", SECRET_TOKEN], variables=saving_often, fresh=True) as node:
        node.wait_for("checkpoint", lambda status: status["checkpoints"]["last_saved_step"] is not None)
        node.post("/api/training/pause")
        yield node


@pytest.fixture
def neuroshard(node: NodeProcess, tmp_path: Path) -> Command:
    """The command beside that node."""
    return Command(tmp_path / "home", {"NEUROSHARD_DATA_DIR": str(node.data_dir)})


def test_the_token_is_not_on_the_command_line(node: NodeProcess) -> None:
    place = Path(f"/proc/{node.process.pid}/cmdline")
    if not place.exists():
        pytest.skip("this system does not show command lines in /proc")
    visible = place.read_bytes()
    assert b"--token ***" in visible.replace(b"\0", b" ")
    assert SECRET_TOKEN.encode() not in visible


def test_the_token_is_in_no_log_and_no_answer(node: NodeProcess) -> None:
    secret = (node.data_dir / "api-secret").read_text().strip()
    logs = [path.read_text() for path in (node.data_dir / "logs").iterdir()]
    assert any("Dashboard:" in text for text in logs)
    places = ("/api/status", "/api/config", "/api/logs", "/api/checkpoints", "/api/data", "/api/training/global")
    answers = [json.dumps(node.get(place)) for place in places]
    for text in (*logs, *answers):
        assert SECRET_TOKEN not in text
        assert secret not in text


def test_no_file_of_the_data_folder_holds_the_token(node: NodeProcess) -> None:
    """The wallet is derived anew at every start, so nothing needs to keep what leads to it."""
    files = [path for path in node.data_dir.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert len(files) > 5
    assert [path for path in files if SECRET_TOKEN.encode() in path.read_bytes()] == []
    private = [node.data_dir / "api-secret", node.data_dir / "keys" / "node-key"]
    if sys.platform != "win32":
        assert [oct(path.stat().st_mode & 0o777) for path in private] == ["0o600", "0o600"]


def test_status_tells_people_and_programs_the_same(neuroshard: Command, node: NodeProcess) -> None:
    shown = replace(neuroshard, fresh=True)("status")
    assert shown.code == 0
    facts = neuroshard("status", "--json").json()
    rows = {label: value for label, _, value in (line.partition("  ") for line in shown.out.splitlines())}
    rows = {label: value.strip() for label, value in rows.items()}
    assert (rows["wallet"], rows["node"]) == (facts["wallet_id"], facts["node_id"])
    assert rows["data folder"] == str(node.data_dir)
    files = {name for name, path in facts["paths"].items() if Path(path).is_file()}
    folders = {name for name, path in facts["paths"].items() if Path(path).is_dir()}
    assert (files, folders) == ({"node_key", "api_secret"}, {"data_dir", "data_cache", "checkpoints", "logs"})
    assert facts["wallet_id"] == Wallet.from_secret(parse_token(SECRET_TOKEN)).wallet_id
    assert (rows["state"], rows["reason"]) == ("paused", "Paused by the user.")
    assert rows["a kill could lose"].startswith("at most")


def test_open_prints_the_way_in_where_no_browser_can_be_opened(neuroshard: Command, node: NodeProcess) -> None:
    shown, facts = neuroshard("open"), neuroshard("open", "--json").json()
    assert shown.code == 0, shown.err
    page, address = Path(facts["page"]), shown.out.splitlines()[1]
    assert (page.parent, f"file {page}" in shown.err) == (node.data_dir, True)
    assert facts["address"] in page.read_text()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (page, page.parent)] == [0o600, 0o700]
    for keyed in (address, facts["address"]):
        url, _, key = keyed.partition("#key=")
        assert url == f"http://localhost:{node.port}/"
        asked = [httpx.post(f"{node.url}/api/session", json={"secret": key}, trust_env=False) for _ in range(2)]
        assert [answer.status_code for answer in asked] == [200, 401]


def test_open_gives_the_browser_a_page_and_no_command_line_the_key(
    neuroshard: Command, node: NodeProcess, tmp_path: Path
) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$@" >> "{opened}"\n')
    browser.chmod(0o755)
    shown = neuroshard.having(DISPLAY=":9", BROWSER=str(browser))("open")
    assert (shown.code, "Your browser opens" in shown.out) == (0, True), shown.err
    assert opened.read_text().split() == [(node.data_dir / "dashboard.html").as_uri()]
    assert "key=" not in shown.out


def test_a_token_for_programs_reads_and_changes_nothing(neuroshard: Command, node: NodeProcess) -> None:
    headers = {"Authorization": f"Bearer {neuroshard('token', 'read').out.strip()}"}
    with httpx.Client(base_url=node.url, headers=headers, trust_env=False) as program:
        assert "neuroshard_tokens_total" in program.get("/metrics").text
        assert program.patch("/api/config", json={"memory": 900}).status_code == 401
        assert program.get("/api/session").status_code == 401
    assert httpx.get(f"{node.url}/metrics", trust_env=False).status_code == 401
    lost = neuroshard.having(NEUROSHARD_DATA_DIR=str(node.data_dir / "nothing"))("token", "read")
    assert (lost.code, "--data-dir" in lost.err) == (2, True)


def test_pause_and_resume(neuroshard: Command, node: NodeProcess) -> None:
    steps = node.get("/api/status")["training"]["steps"]
    resumed = neuroshard("resume")
    assert (resumed.code, resumed.out) == (0, "Training resumes.\n")
    node.wait_for_steps(steps + 1)
    paused = neuroshard("pause")
    assert (paused.code, paused.out) == (0, "Paused until it is resumed; finished steps are kept.\n")
    rest = node.wait_for("pause", lambda status: status["state"] == "paused")["training"]["steps"]
    assert neuroshard("status", "--json").json()["training"]["steps"] == rest


def test_a_pause_can_end_by_itself(neuroshard: Command, node: NodeProcess) -> None:
    assert neuroshard("pause", "--for", "3000").code == 0
    assert re.search(r"^paused until +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", neuroshard("status").out, re.MULTILINE)
    told = neuroshard("pause", "--for", "0.5", "--json").json()
    assert told["state"] == "paused"
    node.wait_for("end of the pause", lambda status: status["state"] == "training", seconds=20)
    node.post("/api/training/pause")


def test_logs_are_lines_for_people_and_objects_for_programs(neuroshard: Command) -> None:
    lines = neuroshard("logs").out.splitlines()
    assert any("Dashboard: http://localhost:" in line for line in lines)
    assert any("`neuroshard open --data-dir " in line for line in lines)
    records = [json.loads(line) for line in neuroshard("logs", "--json").out.splitlines()]
    assert {"sequence", "time", "level", "logger", "message"} <= records[0].keys()
    numbers = [record["sequence"] for record in records]
    assert numbers == sorted(set(numbers))


def test_generate_continues_a_prompt(neuroshard: Command) -> None:
    streamed = neuroshard("generate", "The ", "--max-tokens", "8", "--temperature", "0")
    assert streamed.code == 0
    assert streamed.out.endswith("\n")
    assert len(streamed.out) > 1
    whole = neuroshard("generate", "The ", "--max-tokens", "8", "--seed", "1", "--json").json()
    count = whole["usage"]["completion_tokens"]
    # A sampled text may end before the limit: the weights of a node that trains differ from run to run.
    assert count == 8 or (count < 8 and whole["choices"][0]["finish_reason"] == "stop")


def test_chat_keeps_the_conversation_and_drops_what_the_model_cannot_read(neuroshard: Command) -> None:
    lines = "A list.\n\n" + "A tuple. " * 60 + "\nA dictionary.\n" + "A set. " * 60 + "\nOne more.\n"
    outcome = chat(neuroshard, lines, "--max-tokens", "4", "--temperature", "0", "--system", "Be brief.")
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.count("\n") >= 5
    assert "the oldest message and its reply are left out" in outcome.stderr
    too_long = chat(neuroshard, "word " * 5_000)
    assert too_long.returncode == 1
    assert "the model reads at most" in too_long.stderr


def chat(neuroshard: Command, lines: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = neuroshard.arguments("chat", *options)
    return subprocess.run(
        command, input=lines, env=neuroshard.environment(), capture_output=True, text=True, check=False
    )


def test_a_prompt_may_have_bytes_that_are_no_text(neuroshard: Command) -> None:
    if sys.platform == "win32":
        pytest.skip("arguments are always text there")
    assert neuroshard("generate", "caf\udce9", "--max-tokens", "2").code == 0


def test_a_refusal_of_the_node_is_told_in_its_words(neuroshard: Command) -> None:
    outcome = neuroshard("generate", "The ", "--top-p", "0")
    assert outcome.code == 1
    assert outcome.err.startswith("neuroshard: The node refused: ")
    assert "top_p" in outcome.err


@pytest.mark.parametrize("command", [("generate", "The "), ("chat",)])
def test_the_length_of_an_answer_has_a_limit_that_the_command_names(
    neuroshard: Command, command: tuple[str, ...]
) -> None:
    outcome = neuroshard(*command, "--max-tokens", "2049")
    assert (outcome.code, "--max-tokens" in outcome.err, "2048" in outcome.err) == (2, True, True)


def test_checkpoints_are_listed_and_checked_beside_the_node(neuroshard: Command, node: NodeProcess) -> None:
    node.post("/api/checkpoints")  # waits for a write that is on its way
    found = neuroshard("checkpoint", "list", "--json").json()
    steps = [item["step"] for item in found]

    def is_told(_status: object) -> bool:
        return [item["step"] for item in node.get("/api/checkpoints")["generations"]] == steps

    node.wait_for("the same in the API", is_told)
    verified = neuroshard("checkpoint", "verify", "--json")
    assert verified.code == 0
    assert [(item["path"], item["sound"]) for item in verified.json()] == [(item["path"], True) for item in found]


def test_going_back_needs_a_stopped_node(neuroshard: Command) -> None:
    outcome = neuroshard("checkpoint", "restore", "--at", "2020-01-01")
    assert outcome.code == 2
    assert "neuroshard stop" in outcome.err


def test_the_doctor_finds_everything_well(neuroshard: Command, node: NodeProcess, small_genesis: Path) -> None:
    healthy = neuroshard.having(NEUROSHARD_TOKEN=SECRET_TOKEN, NEUROSHARD_GENESIS=str(small_genesis))
    outcome = healthy("doctor", "--json")
    assert outcome.code == 0
    facts = outcome.json()
    assert {finding["subject"] for finding in facts["findings"]} == {
        *("python", "torch", "device", "precision", "speed", "memory", "disk", "port", "p2p port", "nat", "peers"),
        *("autostart", "token", "data", "clock"),
    }  # fmt: skip
    details = {finding["subject"]: finding["detail"] for finding in facts["findings"]}
    assert str(node.port) in details["port"]
    assert f"the running node computes in {node.get('/api/status')['training']['precision']}; " in details["precision"]
    assert "16 shards, signed" in details["data"]
    status = node.get("/api/status")
    assert status["network"]["explanation"] in details["nat"]
    assert all(address in details["p2p port"] for address in status["network"]["addresses"])
    assert details["peers"].startswith("0 of the run")
    assert facts["settings"] == node.get("/api/config")  # of the running node, whatever this shell has
    assert status["wallet_id"] in details["token"]
    assert f"{status['memory']['limit_mb']:,} MB" in details["memory"]
    assert SECRET_TOKEN not in outcome.out


def test_the_doctor_says_what_is_wrong_and_what_to_do(neuroshard: Command, tmp_path: Path) -> None:
    outcome = neuroshard("doctor", "--genesis", tmp_path / "nowhere", "--data-dir", tmp_path / "no-node")
    assert outcome.code == 1
    assert "BAD token" in outcome.out
    assert "neuroshard wallet new" in outcome.out
    assert "BAD data" in outcome.out
    assert str(tmp_path / "nowhere") in outcome.out


def test_the_doctor_asks_the_given_peers_and_ports_when_no_node_runs(
    neuroshard: Command, small_genesis: Path, tmp_path: Path
) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        alone = neuroshard.having(
            NEUROSHARD_TOKEN=SECRET_TOKEN,
            NEUROSHARD_DATA_DIR=str(tmp_path / "alone"),
            NEUROSHARD_PEER=nobody,
            NEUROSHARD_P2P_PORT=str(taken.getsockname()[1]),
            NEUROSHARD_PORT=str(free_port()),
        )
        outcome = alone("doctor", "--genesis", small_genesis, "--json")
    assert outcome.code == 1
    findings = {finding["subject"]: finding for finding in outcome.json()["findings"]}
    assert {name for name, finding in findings.items() if not finding["is_well"]} == {"p2p port", "peers"}
    assert nobody in findings["peers"]["action"]
    assert "--p2p-port" in findings["p2p port"]["action"]
    assert "no other clock was available for comparison" in findings["clock"]["detail"]


@pytest.mark.parametrize(("slow_seconds", "is_well"), [(0, True), (7200, False), (-7200, False)])
def test_a_clock_that_is_wrong_by_the_word_of_the_server_is_told(slow_seconds: int, is_well: bool) -> None:
    with dating_server(slow_seconds) as url:
        found = doctor_network.clock(case_of(url))
    assert found.is_well == is_well
    if not is_well:
        assert f"s {'ahead of' if slow_seconds > 0 else 'behind'} the data's server" in found.detail
        assert "date and time" in found.action


def test_an_answer_out_of_a_cache_is_dated_by_its_age() -> None:
    with dating_server(3600, age_seconds=3600) as url:
        assert doctor_network.clock(case_of(url)).is_well


@contextmanager
def dating_server(slow_seconds: int, age_seconds: int = 0) -> Iterator[str]:
    """Tells the date, as every HTTP server does, by a clock that is slow; a cache adds the age of the answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            if age_seconds:
                self.send_header("Age", str(age_seconds))
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(time.time() - slow_seconds if timestamp is None else timestamp)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def case_of(url: str) -> Case:
    return Case(load_settings({"genesis": url}, {}), None)


def test_a_second_start_names_the_first_and_ends_well(neuroshard: Command, node: NodeProcess) -> None:
    outcome = neuroshard.having(NEUROSHARD_TOKEN=SECRET_TOKEN)("--headless", "--port", "0")
    assert outcome.code == 0
    assert f"(process {node.process.pid}): http://localhost:{node.port}" in outcome.out
    assert node.get("/health")["status"] == "ok"


def test_commands_find_the_node_by_its_folder_or_its_port(node: NodeProcess, tmp_path: Path) -> None:
    bare = Command(tmp_path / "home")
    assert bare("status", "--data-dir", node.data_dir, "--json").json()["data_dir"] == str(node.data_dir)
    lost = bare("status")
    assert lost.code == 4
    assert "--data-dir" in lost.err


def test_the_same_token_in_another_folder_is_a_second_node(node: NodeProcess, quick: list[str], tmp_path: Path) -> None:
    with running_node(tmp_path / "second", [*quick, "--token", SECRET_TOKEN]) as second:
        status = second.wait_for("second node id", lambda status: status["node_id"] is not None)
        first = node.get("/api/status")
        assert status["wallet_id"] == first["wallet_id"]
        assert status["node_id"] != first["node_id"]


def test_stop_returns_when_the_folder_is_free_again(neuroshard: Command, node: NodeProcess) -> None:
    """Last of this module: afterwards the node is gone."""
    outcome = neuroshard("stop")
    assert (outcome.code, outcome.out) == (0, "Stopping after a final checkpoint.\nStopped.\n")
    assert neuroshard("checkpoint", "restore", "--at", "2020-01-01").code == 5  # not 2: nobody holds the folder
    assert node.process.wait(20) == 0
