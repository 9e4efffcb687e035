"""Friends in the dashboard: the owner invites, a link is opened while a node runs, and the node joins another run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from dashboard_session import OpenPage
from playwright.sync_api import Page, expect
from wizard_session import FirstRun, check_page, heading, press, started

from benchmarks import preloaded
from benchmarks.node_process import NodeProcess, running_node
from tests.worlds.processes import LONGEST_SECONDS, made, nodes_of, peers_of, until

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(600)]

FRIENDS = "architecture = { depth = 2, sequence_length = 64 }\nbatch_size = 1\ninner_steps = 5\n"
REFUSALS = "Failed to load resource"  # the node while it starts again


def dashboard_of(node: NodeProcess, open_page: OpenPage) -> Page:
    secret = node.authorised()["Authorization"].removeprefix("Bearer ")
    return open_page(f"{node.url}/#/friends", secret=secret, excused=REFUSALS)


def invite(page: Page, label: str) -> str:
    """Make an invitation in the owner's page and return its link."""
    page.get_by_label("Name of the invitation").fill(label)
    press(page, "Make an invitation")
    line = page.get_by_label("Link of the invitation", exact=True)
    expect(line).to_be_visible()
    return line.inner_text().strip()


def opened(desktop: FirstRun, data_dir: Path, link: str) -> tuple[int, str]:
    """A click on a link, as the desktop passes it on."""
    command = [*preloaded.program(), "link", "--data-dir", str(data_dir), "--", link]
    done = subprocess.run(command, env=desktop.environment(), capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_an_invitation_made_in_the_page_is_opened_by_a_click_and_joined(
    open_page: OpenPage, small_genesis: Path, small_text: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(FRIENDS, small_genesis, tmp_path)
    desktop = FirstRun(tmp_path / "home")
    alone = ["--text", str(small_text), "--memory", "600", "--cpu-threads", "1"]
    with nodes_of(run, quick, tmp_path) as start:
        owner = start(0)
        owner.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        page = dashboard_of(owner, open_page)
        heading(page, "Friends")
        expect(page.get_by_label("Name of the invitation")).to_be_visible()
        check_page(page)
        link = invite(page, "Cleo")
        expect(page.get_by_role("img", name="QR code of the invitation")).to_be_visible()
        expect(page.get_by_role("listitem").filter(has_text="Cleo")).to_contain_text("1 of 1 place left")
        expect(page.get_by_text("Invite somebody first")).to_be_visible()
        check_page(page)
        with running_node(tmp_path / "guest", alone, variables={"NEUROSHARD_TOKEN": "c3" * 32}) as guest:
            guest.wait_for_steps(1, LONGEST_SECONDS)
            code, told = opened(desktop, guest.data_dir, link + "x")
            assert code == 0, told
            shown = open_page(desktop.wait_for_page(), excused=REFUSALS)
            heading(shown, "Friends")
            expect(shown.get_by_role("alert")).to_contain_text("Copy all of it")
            code, told = opened(desktop, guest.data_dir, link)
            assert code == 0, told
            shown.goto(desktop.wait_for_page(2))
            expect(shown.get_by_role("heading", name="Join the run friends?")).to_be_visible()
            check_page(shown)
            assert link not in told
            assert guest.get("/api/status")["run"]["run_id"] != run.run_id  # a click joins nothing
            press(shown, "Join")
            joined = guest.wait_for(
                "the run", lambda status: (status["run"] or {}).get("run_id") == run.run_id, LONGEST_SECONDS
            )
            until("the owner sees the guest", lambda: joined["node_id"] in peers_of(owner))
            expect(shown.get_by_role("heading", level=1)).to_have_text("Friends")
            expect(shown.get_by_text("Runs of this computer")).to_be_visible()  # the page found the node again
            expect(page.get_by_role("listitem").filter(has_text="Cleo").first).to_contain_text("0 of 1 place left")
            press(page, "Make deputy: Cleo")
            expect(page.get_by_text("deputy", exact=True)).to_be_visible()
            press(shown, "Train a run of my own")
            guest.wait_for("its own run", lambda status: (status["run"] or {}).get("run_id") not in {None, run.run_id})
            shown.goto("about:blank")
        press(page, "Revoke: Cleo")
        expect(page.get_by_role("listitem").filter(has_text="Cleo").first).to_contain_text("revoked")
        page.goto("about:blank")


def test_a_link_without_a_node_opens_the_wizard_with_the_invitation(open_page: OpenPage, tmp_path: Path) -> None:
    desktop = FirstRun(tmp_path / "home", variables={"NEUROSHARD_NETWORK": "false"})
    hostile = "neuroshard://join/%22%20--data-dir%20/tmp/x <script>"
    with started(desktop, "link", "--", hostile):
        page = open_page(desktop.wait_for_page(), excused=REFUSALS)
        heading(page, "Join with an invitation")
        expect(page.get_by_role("alert")).to_contain_text("Copy all of it")
        with started(desktop, "link", "--", "A" * 5_000) as second:
            told, _ = second.communicate(timeout=60)
            assert second.returncode == 0, told
        again = open_page(desktop.wait_for_page(2), excused=REFUSALS)
        expect(again.get_by_role("alert")).to_contain_text("at most 1600 are read")
        again.goto("about:blank")
        page.goto("about:blank")
    assert not (desktop.data_dir / "config.toml").exists()


def test_a_computer_of_the_same_network_knocks_and_is_let_in(
    open_page: OpenPage, small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(FRIENDS, small_genesis, tmp_path)
    with nodes_of(run, quick, tmp_path) as start:
        owner = start(0)
        status = owner.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        page = dashboard_of(owner, open_page)
        heading(page, "Friends")
        peer = ["--peer", status["network"]["addresses"][0], "--memory", "500", "--cpu-threads", "1"]
        with running_node(tmp_path / "knocker", peer, variables={"NEUROSHARD_TOKEN": "d4" * 32}) as knocker:
            card = page.get_by_role("region", name="asks to join")
            expect(card).to_be_visible(timeout=LONGEST_SECONDS * 1000)
            check_page(page)
            words = card.locator("p.mono").inner_text()
            assert len(words.split()) == 4
            knocker.wait_for("the words", lambda status: words in status["state_reason"], LONGEST_SECONDS)
            expect(page.get_by_text(f"asks to join ({words})")).to_be_visible()  # a banner, in every view
            press(page, "Allow")
            knocker.wait_for_steps(1, LONGEST_SECONDS)
            assert knocker.get("/api/status")["run"]["run_id"] == run.run_id
            expect(page.get_by_text(f"asks to join ({words})")).to_have_count(0)
        page.goto("about:blank")
