"""The page for friends on a node that invents its answers: forms keep the focus, and say what is wrong in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import swarm_snapshots
from dashboard_session import OpenPage, StartNode
from playwright.sync_api import Page, expect
from wizard_session import check_page, press

from neuroshard.status.board import Invite
from neuroshard.status.snapshot import NetworkState, NodeStatus

pytestmark = pytest.mark.browser


INVITATION = {"label": "Cleo", "key": "1" * 64, "uses": 1, "left": 1, "not_after": 2e9, "state": "valid"}
RUN = {
    "run_id": "2" * 64,
    "name": "friends",
    "is_owner": True,
    "may_invite": True,
    "has_deputies": True,
    "deputies": [],
    "members": [],
}
SHOWN = {"invitation": None, "fault": None}
MEMBERS = {"run": RUN | {"invitations": [INVITATION]}, "runs": [], "knocks": [], "nearby": None, "shown": SHOWN}


def open_owners_page(open_page: OpenPage, url: str, excused: str | None = None) -> Page:
    """The page for friends of the owner of a run with one invitation."""
    page = open_page(url, excused=excused)
    page.route("**/api/members", lambda route: route.fulfill(json=MEMBERS))
    page.goto(f"{url}#/friends")
    return page


def test_a_wrong_limit_of_an_invitation_is_told_beside_its_field(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_owners_page(open_page, node.url, "responded with a status of 422")
    cases = {
        "Wallets that can join": {
            "": "at least 1",
            "1e99": "whole number",
            "1.5": "whole number",
            "10001": "at most 10000",
        },
        "Days until it ends": {"1e99": "Use at most 3650.", "-1": "Use at least 0.01.", "soon": "Use a number."},
        "Name of the invitation": {"x" * 41: "Use at most 40 characters."},
    }
    for label, wrong in cases.items():
        field = page.get_by_label(label)
        before = field.input_value()
        for text, words in wrong.items():
            field.fill(text)
            press(page, "Make an invitation")
            expect(page.get_by_role("alert")).to_contain_text(words)
            expect(field).to_be_focused()
            expect(field).to_have_accessible_description(page.get_by_role("alert").inner_text())
        field.fill(before)
    assert node.taken == []
    button = page.get_by_role("button", name="Make an invitation")
    button.press("Enter")
    expect(page.get_by_label("Link of the invitation", exact=True)).to_be_visible()
    expect(button).to_be_focused()
    assert [type(command) for command in node.taken] == [Invite]
    check_page(page)


def test_after_revoking_the_focus_is_on_the_invitation(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_owners_page(open_page, start_node().url)
    page.get_by_role("button", name="Revoke: Cleo").press("Enter")
    expect(page.get_by_role("listitem").filter(has_text="Cleo")).to_be_focused()


def test_an_empty_invitation_is_not_called_damaged(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node().url}#/friends", excused="responded with a status of 422")
    press(page, "Show the invitation")
    expect(page.get_by_role("alert")).to_have_text("There is no invitation. Paste its link or its code.")
    expect(page.get_by_label("Invitation", exact=True)).to_be_focused()


def friends_run(status: NodeStatus) -> NodeStatus:
    return replace(status, network=replace(status.network, join_line="neuroshard --invite LINK --genesis '/my data'"))


def a_demo(status: NodeStatus) -> NodeStatus:
    assert status.run is not None
    return replace(status, run=replace(status.run, is_demo=True))


def without_network(status: NodeStatus) -> NodeStatus:
    return replace(status, network=replace(status.network, state=NetworkState.OFF, join_line=""))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (a_demo, "Nobody can join a demo."),
        (without_network, "Turn on Network in the settings"),
        (lambda status: status, "Anyone may join this run"),
    ],
)
def test_a_node_that_makes_no_invitations_says_what_to_do(
    start_node: StartNode, open_page: OpenPage, change: Callable[[NodeStatus], NodeStatus], words: str
) -> None:
    page = open_page(f"{start_node(change(swarm_snapshots.among(4))).url}#/friends")
    expect(page.get_by_role("region", name="Invite")).to_contain_text(words)


@pytest.mark.parametrize("alone", [False, True])
def test_a_run_of_friends_shows_the_way_to_an_invitation_and_no_line(
    start_node: StartNode, open_page: OpenPage, *, alone: bool
) -> None:
    status = swarm_snapshots.alone() if alone else swarm_snapshots.among(4)
    node = start_node(friends_run(status))
    page = open_page(f"{node.url}#/swarm")
    card = page.get_by_role("region", name="Invite")
    expect(card).not_to_contain_text("LINK")
    expect(card).not_to_contain_text("folder of this computer")
    card.get_by_role("link", name="Make an invitation").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Friends")
    node.publish(lambda _: a_demo(status))
    page.goto(f"{node.url}#/swarm")
    expect(card).to_contain_text("Nobody can join a demo.")


def test_an_organised_run_has_invitations_and_no_deputies(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_owners_page(open_page, url := start_node().url)
    deputies = page.get_by_role("region", name="Name a deputy?")
    expect(deputies).to_be_visible()
    organised = MEMBERS | {"run": RUN | {"has_deputies": False, "invitations": [INVITATION]}}
    page.route("**/api/members", lambda route: route.fulfill(json=organised))
    page.goto(f"{url}#/friends")
    page.reload()
    expect(page.get_by_role("button", name="Make an invitation")).to_be_visible()
    expect(deputies).to_have_count(0)
