"""A run of the local network in the wizard: its list in a browser, and two computers from the start to a step."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import snapshots
from dashboard_session import OpenPage, StartNode
from playwright.sync_api import expect
from wizard_session import FirstRun, check_page, heading, press, started

from benchmarks.node_process import free_port, running_node
from neuroshard.network.lan_runs import FORGOTTEN_SECONDS
from neuroshard.network.mdns import RunNotice
from neuroshard.status.board import JoinRun
from neuroshard.types import RunId
from tests.worlds.lan import Computer, local_network
from tests.worlds.processes import LONGEST_SECONDS, made, nodes_of
from tests.worlds.setup_api import SetupApi

HOME = RunNotice(RunId("3" * 64), "home", 2)
PHRASE = "legal winner thank year wave sausage worth useful legal winner thank yellow"
FRIENDS = "architecture = { depth = 2, sequence_length = 64 }\nbatch_size = 1\ninner_steps = 5\n"
ASK = """
import json, sys, urllib.request
url, secret, body = sys.argv[1:]
headers = {"Authorization": "Bearer " + secret, "Content-Type": "application/json"}
request = urllib.request.Request(url, body.encode() or None, headers)
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""


@pytest.mark.browser
def test_a_run_appears_while_its_reader_looks_and_join_leads_to_the_wallet(tmp_path: Path, open_page: OpenPage) -> None:
    wizard = SetupApi(tmp_path / "node", is_given=False, port=free_port(), now=time.time())
    with wizard.served() as address:
        page = open_page(address)
        heading(page, "What would you like to do?")
        part = page.get_by_role("region", name="on your network")
        expect(part).to_contain_text("None found so far")
        check_page(page)
        wizard.nearby.hear([HOME, RunNotice(RunId("4" * 64), "", 1)], 0.0)
        expect(part.get_by_role("listitem")).to_have_text(["home (2 computers)Join", "Run 44444444 (1 computer)Join"])
        check_page(page)
        page.set_viewport_size({"width": 390, "height": 844})
        check_page(page)
        wizard.nearby.hear([RunNotice(HOME.run, "home", 3)], FORGOTTEN_SECONDS)  # the other one has left
        expect(part.get_by_role("listitem")).to_have_text(["home (3 computers)Join"])
        press(page, "Join home")
        heading(page, "Which wallet?")
        page.go_back()
        press(page, "See it work")
        page.goto("about:blank")
    assert wizard.desk.arrival.nearby_run == RunNotice(HOME.run, "home", 3)


@pytest.mark.browser
def test_a_running_node_lists_the_runs_nearby_and_joins_one_without_a_mouse(
    start_node: StartNode, open_page: OpenPage
) -> None:
    node = start_node(snapshots.training())
    page = open_page(f"{node.url}#friends", still=True)
    part = page.get_by_role("region", name="on your network")
    expect(part.get_by_role("listitem")).to_have_text(["home (2 computers)Join"])
    check_page(page)
    page.set_viewport_size({"width": 390, "height": 844})
    check_page(page)
    page.get_by_role("button", name="Show the invitation").focus()
    page.keyboard.press("Tab")
    expect(part.get_by_role("button", name="Join home")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="saves a checkpoint and starts again")).to_be_visible()
    assert node.taken == [JoinRun(run_id=HOME.run)]


@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_second_computer_finds_the_run_and_trains_when_its_owner_allows_it(
    tmp_path: Path, small_genesis: Path, quick: list[str]
) -> None:
    """Real multicast and real processes on two computers that have nothing but a cable between them."""
    run = made(FRIENDS, small_genesis, tmp_path)
    heard_all = {"NEUROSHARD_P2P_HOST": "0.0.0.0"}
    desktop = FirstRun(tmp_path / "home", variables=heard_all)
    with local_network() as (near, far), nodes_of(run, quick, tmp_path, heard_all) as start:
        owner = start(0, place=("ip", "netns", "exec", near.name))
        its = Asking(near, owner.port, owner.data_dir)
        its.until("/api/status", lambda status: status["training"]["steps"] > 0)
        with started(desktop, place=("ip", "netns", "exec", far.name)):
            desktop.wait_for_page()
            here, began = Asking(far, desktop.port, desktop.data_dir), time.monotonic()
            arrival = here.until("/api/setup", lambda setup: setup["arrival"]["nearby"])["arrival"]
            assert time.monotonic() - began < 10
            row = {"run_id": run.run_id, "name": "friends", "computers": 1}
            assert arrival["nearby"] == [row]
            here.ask("/api/setup/purpose", {"purpose": "nearby", "run_id": run.run_id})
            here.ask("/api/setup/wallet", {"source": "enter", "phrase": PHRASE})
            here.ask("/api/setup/choices", {"settings": {"memory": 500, "cpu_threads": 1}})
            here.ask("/api/setup/finish", {})
            (knock,) = its.until("/api/members", lambda members: members["knocks"])["knocks"]
            waits = here.until("/api/status", lambda status: knock["words"] in status["state_reason"])
            assert waits["training"]["steps"] == 0
            its.ask("/api/knocks", {"wallet_id": knock["wallet_id"], "is_allowed": True})
            trains = here.until("/api/status", lambda status: status["training"]["steps"] > 0)
            assert trains["run"]["run_id"] == run.run_id


@pytest.mark.process
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_that_trains_alone_finds_the_run_joins_it_and_trains_when_its_owner_allows_it(
    tmp_path: Path, small_genesis: Path, small_text: Path, quick: list[str]
) -> None:
    """The same on a computer on which a node runs already: it changes its run in the dashboard.

    The test before finds and knocks in the same way, and in `test_friends.py` a running node changes its run.
    """
    run = made(FRIENDS, small_genesis, tmp_path)
    heard_all = {"NEUROSHARD_P2P_HOST": "0.0.0.0"}
    alone = ["--text", str(small_text), "--memory", "600", "--cpu-threads", "1"]
    with local_network() as (near, far), nodes_of(run, quick, tmp_path, heard_all) as start:
        owner = start(0, place=("ip", "netns", "exec", near.name))
        its = Asking(near, owner.port, owner.data_dir)
        its.until("/api/status", lambda status: status["training"]["steps"] > 0)
        variables = {"NEUROSHARD_TOKEN": "c3" * 32, **heard_all}
        with running_node(
            tmp_path / "guest", alone, variables=variables, place=("ip", "netns", "exec", far.name)
        ) as guest:
            here = Asking(far, guest.port, guest.data_dir)
            trains = here.until("/api/status", lambda status: status["training"]["steps"] > 0)
            assert trains["run"]["run_id"] != run.run_id
            nearby = here.until("/api/members", lambda members: members["nearby"])["nearby"]
            assert nearby == [{"run_id": run.run_id, "name": "friends", "computers": 1}]
            here.ask("/api/join", {"run_id": run.run_id})
            (knock,) = its.until("/api/members", lambda members: members["knocks"])["knocks"]
            here.until("/api/status", lambda status: knock["words"] in status["state_reason"])
            its.ask("/api/knocks", {"wallet_id": knock["wallet_id"], "is_allowed": True})
            joined = here.until("/api/status", lambda status: status["training"]["steps"] > 0)
            assert joined["run"]["run_id"] == run.run_id


class Asking:
    """The API of a program on another computer, asked from there."""

    def __init__(self, computer: Computer, port: int, data_dir: Path) -> None:
        self._computer, self._url = computer, f"http://127.0.0.1:{port}"
        self._secret = data_dir / "api-secret"

    def ask(self, path: str, body: object = None) -> dict[str, Any]:
        """The JSON of a GET, or with a body of a POST."""
        given = "" if body is None else json.dumps(body)
        secret = self._secret.read_text().strip()
        return json.loads(self._computer.run(sys.executable, "-c", ASK, self._url + path, secret, given))

    def until(self, path: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first answer of which `holds` is true."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < deadline:
            try:
                answer = self.ask(path)
            except (OSError, subprocess.CalledProcessError):
                answer = None  # it starts
            if answer is not None and holds(answer):
                return answer
            time.sleep(0.3)
        raise TimeoutError(f"{path} never became right")
