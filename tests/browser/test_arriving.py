"""The first question of the wizard, answered in all three ways, and every invitation that it refuses."""

from __future__ import annotations

import resource
import subprocess
import time
from pathlib import Path
from typing import cast

import pytest
from dashboard_session import OpenPage
from playwright.sync_api import Page, expect
from wizard_session import FirstRun, check_dashboard, check_page, heading, press, started

from benchmarks.node_process import NodeProcess, running_node
from neuroshard.identity import TokenSecret, Wallet
from neuroshard.identity.invitations import LINK, InvitationTerms, InvitedPlaces, invite, to_code
from neuroshard.types import RunId
from tests.worlds.claims import identity_of
from tests.worlds.processes import LONGEST_SECONDS, made, neuroshard, nodes_of, peers_of, until

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(600)]

PHRASE = "legal winner thank year wave sausage worth useful legal winner thank yellow"
REFUSALS = "Failed to load resource"  # by the node, or because it is not there
FRIENDS = "architecture = { depth = 2, sequence_length = 64 }\nbatch_size = 1\ninner_steps = 5\n"
QUESTION = "What would you like to do?"
OWNER = Wallet.from_secret(TokenSecret("hex", bytes([7] * 32)))
WEEK = 7 * 86_400
PUBLIC_PEER = f"/dns/node.example.org/tcp/4001/p2p/{identity_of(1).node_id}"


@pytest.fixture
def desktop(tmp_path: Path) -> FirstRun:
    """A computer on which NeuroShard was never started."""
    return FirstRun(tmp_path / "home")


def code_until(seconds: float, *peers: str, name: str = "friends", label: str = "Ada") -> str:
    places = InvitedPlaces(name, peers, ("https://data.example.org/set",))
    return to_code(invite(OWNER, RunId("1" * 64), InvitationTerms(seconds, 1, label), places, seed=bytes(32)))


def paste(page: Page, text: str) -> None:
    page.get_by_label("Invitation", exact=True).fill(text)
    press(page, "Show the invitation")


def enter_wallet(page: Page) -> None:
    """From the wallet to the last page, with the shortest answers."""
    heading(page, "Which wallet?")
    page.get_by_label("I have a wallet").check()
    page.get_by_label("Wallet phrase").fill(PHRASE)
    press(page, "Next")
    heading(page, "What may it use?")
    page.get_by_label("Own limits").check()
    page.get_by_label("Memory (MB)").fill("600")
    page.get_by_label("Processor threads").fill("1")
    press(page, "Next")
    heading(page, "When may it work?")
    press(page, "Next")
    heading(page, "Ready to start")


def node_at(desktop: FirstRun, process: subprocess.Popen[str]) -> NodeProcess:
    """The API of the node that took the wizard's place."""
    return NodeProcess(cast("subprocess.Popen[bytes]", process), desktop.port, desktop.data_dir, time.perf_counter())


def test_see_it_work_starts_the_demo_at_the_wizards_address(desktop: FirstRun, open_page: OpenPage) -> None:
    with started(desktop) as process:
        page = open_page(desktop.wait_for_page(), excused=REFUSALS)
        heading(page, QUESTION)
        check_page(page)
        expect(page.get_by_text("There is no public run yet")).to_be_visible()
        press(page, "See it work")
        check_dashboard(page)
        expect(page.get_by_text("Demo data", exact=True)).to_be_visible()
        with started(desktop) as second:
            told, _ = second.communicate(timeout=60)
        assert "already runs" in told
        again = open_page(desktop.addresses()[-1], excused=REFUSALS)
        check_dashboard(again)
        again.goto("about:blank")
        page.goto("about:blank")
        assert process.poll() is None
    assert not (desktop.data_dir / "keys").exists()
    assert not (desktop.data_dir / "config.toml").exists()


def test_my_own_text_is_trained_on(desktop: FirstRun, open_page: OpenPage, small_text: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    (few / "a.txt").write_text("A short text.")
    with started(desktop, "--no-network") as process:
        page = open_page(desktop.wait_for_page(), excused=REFUSALS)
        press(page, "Train on my own text")
        heading(page, "Which text?")
        check_page(page)
        for folder, words in (
            ("notes", "Enter the whole path"),
            (str(tmp_path / "none"), "is not a folder"),
            (str(few), "At least 100 kB are needed"),
        ):
            page.get_by_label("Folder", exact=True).fill(folder)
            press(page, "Next")
            expect(page.get_by_role("alert")).to_contain_text(words)
        page.get_by_label("Folder", exact=True).fill(str(small_text))
        press(page, "Next")
        enter_wallet(page)
        expect(page.get_by_text(str(small_text))).to_be_visible()
        press(page, "Start")
        check_dashboard(page)
        node = node_at(desktop, process)
        node.wait_for_steps(1, LONGEST_SECONDS)
        assert node.get("/api/status")["run"]["explanation"] == "This computer trains a model of its own on your text."
        page.goto("about:blank")
        process.terminate()
        process.wait(60)
    assert f'text = "{small_text}"' in (desktop.data_dir / "config.toml").read_text()


def test_a_friend_joins_with_nothing_but_the_link(
    desktop: FirstRun, open_page: OpenPage, small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(FRIENDS, small_genesis, tmp_path)
    desktop.variables["NEUROSHARD_LAN_DISCOVERY"] = "false"
    with nodes_of(run, quick, tmp_path) as start:
        owner = start(0)
        owner.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        file, image = tmp_path / "bo.neuroshard-invitation", tmp_path / "bo.svg"
        invited = neuroshard(
            "run", "invite", "--label", "Bo", "--file", file, "--qr", image, "--data-dir", run.data_dir
        )
        assert invited.code == 0, invited.err
        assert image.read_bytes().startswith(b"<svg ")
        with started(desktop) as process:
            page = open_page(desktop.wait_for_page(), excused=REFUSALS)
            press(page, "Join with an invitation")
            heading(page, "Join with an invitation")
            check_page(page)
            page.locator("input[type=file]").set_input_files(file)
            expect(page.get_by_label("Invitation", exact=True)).to_have_value(file.read_text().strip())
            press(page, "Show the invitation")
            heading(page, "Join the run friends?")
            check_page(page)
            for words in ("Bo", "can hold a stage", "sent by the computers of the run", "one wallet"):
                expect(page.get_by_text(words, exact=words == "Bo").first).to_be_visible()
            assert process.poll() is None
            assert len(peers_of(owner)) == 0  # nothing is dialled before Join
            press(page, "Join")
            enter_wallet(page)
            press(page, "Start")
            check_dashboard(page)
            friend = node_at(desktop, process)
            friend.wait_for_steps(2, LONGEST_SECONDS)
            me = friend.get("/api/status")
            assert me["run"]["run_id"] == run.run_id
            until("the owner sees the friend", lambda: me["node_id"] in peers_of(owner))
            page.goto("about:blank")
            process.terminate()
            process.wait(60)
        chosen = desktop.data_dir / "runs/chosen.json"
        assert chosen.stat().st_mode & 0o777 == 0o600
        assert LINK not in chosen.read_text()
        assert '"code":null' in chosen.read_text()  # the invitation is used: only the pass is kept
        with started(desktop) as process:  # the next start asks nothing and joins again
            desktop.wait_for_page(2)
            node_at(desktop, process).wait_for(
                "the run", lambda status: (status["run"] or {}).get("run_id") == run.run_id, LONGEST_SECONDS
            )


def refused() -> list[tuple[str, str]]:
    """Texts and the sentence that each is answered with."""
    good = code_until(time.time() + WEEK, PUBLIC_PEER)
    other = good[:40] + ("A" if good[40] != "A" else "B") + good[41:]
    local = code_until(time.time() + WEEK, f"/ip4/10.255.254.253/tcp/4001/p2p/{identity_of(1).node_id}")
    return [
        (other, "Copy all of it"),
        ("", "Paste its link or its code"),
        (code_until(1_700_000_000, PUBLIC_PEER), "The invitation expired on 2023-11-14 22:13 UTC"),
        ("A" * 10_000, "The invitation has 10000 characters; at most 1600 are read."),
        ("neuroshard://join/<script>alert(1)</script>", "Copy all of it"),
        ("neuroshard://join/../../etc/passwd", "Copy all of it"),
        ("javascript:alert(document.cookie)", "This text is not an invitation"),
        (local, "private addresses that are not on this computer's network"),
    ]


def test_every_refusal_is_one_sentence_in_the_page(desktop: FirstRun, open_page: OpenPage) -> None:
    desktop.variables |= {"NEUROSHARD_NETWORK": "false"}
    with started(desktop):
        page = open_page(desktop.wait_for_page(), excused=REFUSALS)
        press(page, "Join with an invitation")
        for text, words in refused():
            paste(page, text)
            expect(page.get_by_role("alert")).to_contain_text(words)
            expect(page.get_by_role("heading", level=1)).to_have_text("Join with an invitation")
        paste(page, f"  {LINK}{code_until(time.time() + WEEK, PUBLIC_PEER, name='<b>bold</b>', label='<i>x</i>')}\n")
        heading(page, "Join the run <b>bold</b>?")
        expect(page.get_by_text("<i>x</i>")).to_be_visible()
        expect(page.get_by_text("https://data.example.org/set")).to_be_visible()
        page.goto("about:blank")


def test_back_reload_and_a_second_tab_keep_to_the_answers(
    desktop: FirstRun, open_page: OpenPage, small_text: Path
) -> None:
    desktop.variables |= {"NEUROSHARD_NETWORK": "false"}
    with started(desktop):
        page = open_page(desktop.wait_for_page(), excused=REFUSALS)
        press(page, "Join with an invitation")
        paste(page, code_until(time.time() + WEEK, PUBLIC_PEER))
        heading(page, "Join the run friends?")
        page.reload()  # the program keeps the invitation, the page does not
        heading(page, "Join the run friends?")
        page.go_back()
        heading(page, QUESTION)
        page.go_forward()
        heading(page, "Join the run friends?")
        other = page.context.new_page()
        other.goto(page.url.partition("#")[0])
        heading(other, "Join the run friends?")
        other.goto(f"{page.url.partition('#')[0]}#setup-start")  # not before the question is answered
        heading(other, "Join the run friends?")
        press(page, "Join")
        heading(page, "Which wallet?")
        other.goto(f"{page.url.partition('#')[0]}#setup-text")
        other.get_by_label("Folder").fill(str(small_text))
        press(other, "Next")  # the other tab answers differently: the last answer counts, and is shown before the start
        heading(other, "Which wallet?")
        enter_wallet(page)
        expect(page.get_by_text(str(small_text))).to_be_visible()
        other.close()
        page.goto("about:blank")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process: Linux only")
def test_a_full_disk_is_told_at_every_step_and_can_be_freed(
    desktop: FirstRun, open_page: OpenPage, small_text: Path
) -> None:
    desktop.variables |= {"NEUROSHARD_NETWORK": "false"}
    with started(desktop, "--no-training", fresh=True) as process:
        page = open_page(desktop.wait_for_page(), excused=REFUSALS)
        heading(page, QUESTION)
        free = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, free[1]))  # as a full disk: no file may grow
        press(page, "See it work")
        expect(page.get_by_role("alert")).to_contain_text("disk")
        press(page, "Train on my own text")  # steps that write nothing work
        page.get_by_label("Folder", exact=True).fill(str(small_text))
        press(page, "Next")
        enter_wallet(page)
        press(page, "Start")
        expect(page.get_by_role("alert")).to_contain_text("disk")
        assert not (desktop.data_dir / "keys/wallet").exists()
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, free)
        press(page, "Start")
        check_dashboard(page)
        page.goto("about:blank")


def test_without_a_run_and_without_data_a_headless_node_says_what_to_do(tmp_path: Path) -> None:
    nothing = neuroshard("--data-dir", tmp_path / "node", "--headless", "--port", "0", "--no-network")
    assert nothing.code == 6
    assert "no run to join and no text to train on" in nothing.err
    assert "--invite LINK" in nothing.err


def test_a_headless_node_trains_on_text(small_text: Path, tmp_path: Path) -> None:
    arguments = ["--text", str(small_text), "--memory", "600", "--cpu-threads", "1", "--no-network"]
    with running_node(tmp_path / "node", arguments) as node:
        node.wait_for_steps(1, LONGEST_SECONDS)
