"""The Swarm view: who is there, the network's numbers, the join line, and a list that stays small and usable."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import snapshots
import swarm_snapshots
from dashboard_session import MOST_ROWS, OpenPage, StartNode, rows, show_afresh, shown, sign_in, stat
from playwright.sync_api import expect
from swarm_snapshots import JOIN_LINE, among, peer_id

from neuroshard.status.snapshot import NetworkState, NetworkStatus, NodeState

pytestmark = pytest.mark.browser


def test_five_nodes_in_one_sentence_and_four_numbers(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(4)).url}#swarm")
    expect(page.locator("#title-swarm")).to_be_focused()
    sentence = "You and 4 others train this run; together 17,263 tokens per second."
    expect(page.get_by_role("heading", level=2, name=sentence, exact=True)).to_be_visible()
    expect(stat(page, "Nodes")).to_contain_text("5all of them train now")
    expect(stat(page, "Network loss")).to_contain_text("3.512yours 3.605: 0.093 higher")
    expect(stat(page, "Tokens per second")).to_contain_text("17,263yours 2,263 (13 %)")
    expect(stat(page, "Traffic")).to_contain_text("33 MB sent, 81 MB received")
    for rate in ("12 kB/s", "41 kB/s"):
        expect(stat(page, "Traffic")).to_contain_text(rate)


def test_a_row_tells_who_where_how_fast_and_since_when(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(4)).url}#swarm")
    expect(rows(page)).to_have_count(5)
    expect(rows(page).nth(0)).to_contain_text("This computer")
    fastest = rows(page).nth(1)
    wanted = (
        shown(0),
        "Training",
        "driver and validator, layers 1\N{EN DASH}6, shard 0",
        "7,200",
        "3.400",
        "900",
        "Direct, 8 ms",
    )
    for words in (*wanted, "198.51.100.0:40000", "310 kB", "280 kB", "Good"):
        expect(fastest).to_contain_text(words)
    expect(fastest).to_contain_text(re.compile(r"\d\d s"))  # the time since then goes on
    expect(fastest).to_contain_text(re.compile(r"seen \d+ s ago"))
    kinds = page.get_by_role("cell", name=re.compile("^(Direct|Punched|Relayed|Through others)"))
    expect(kinds).to_have_text([re.compile(kind) for kind in ("Direct", "Punched", "Relayed", "Through others")])
    expect(page.get_by_text("Doubtful", exact=True)).to_be_visible()


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, "Another node holds the same layers. From the next round on, all of them agree on one average."),
        (4, "4 other nodes hold the same layers. From the next round on, all of them agree on one average."),
    ],
)
def test_it_says_plainly_how_the_nodes_train_together(
    start_node: StartNode, open_page: OpenPage, count: int, words: str
) -> None:
    node = start_node(among(count))
    page = open_page(f"{node.url}#swarm")
    status = node.board.current()
    assert status.run is not None
    for shown_words in (words, status.run.explanation, status.network.explanation):
        expect(page.get_by_text(shown_words, exact=True)).to_be_visible()


def test_after_a_common_round_its_members_are_told(start_node: StartNode, open_page: OpenPage) -> None:
    """In the words of `OuterSync.status`."""
    together, words = among(4), "The last round had 5 members."
    told = replace(together, diloco=replace(together.diloco, members=5, explanation=words))
    page = open_page(f"{start_node(told).url}#swarm")
    expect(page.get_by_text(words, exact=True)).to_be_visible()


def test_refusals_and_the_upload_limit_are_told(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(4)).url}#swarm")
    card = page.get_by_role("region", name="Connections")
    for words in ("Expired claim: 14 times", "Bad signature: 1 time", "1 peer", "1 direct, 1 punched, 1 relayed"):
        expect(card).to_contain_text(words)
    expect(card.get_by_role("progressbar", name="Upload")).to_have_attribute("aria-valuenow", "1")


def test_the_join_line_is_copied(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(4)).url}#swarm")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy: Join line").click()
    expect(page.get_by_text("Copied", exact=True)).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == JOIN_LINE
    for address in ("/ip4/203.0.113.7/tcp/43817/p2p/", "/ip4/192.168.1.20/tcp/43817/p2p/"):
        expect(page.locator(".addresses")).to_contain_text(address)


def test_the_join_line_is_copied_where_pages_may_not_use_the_clipboard(
    start_node: StartNode, open_page: OpenPage
) -> None:
    """As when the page comes from another computer without https: there is no navigator.clipboard."""
    node, page = start_node(among(4)), open_page("about:blank")
    sign_in(page.context, node.url)
    page.add_init_script("Object.defineProperty(Navigator.prototype, 'clipboard', { get: () => undefined })")
    page.goto(f"{node.url}#swarm")
    copied = "new Promise((done) => addEventListener('copy', () => done(String(getSelection())), { once: true }))"
    page.evaluate(f"window.copied = {copied}; null")
    page.get_by_role("button", name="Copy: Join line").click()
    assert page.evaluate("window.copied") == JOIN_LINE
    expect(page.get_by_text("Copied", exact=True)).to_be_visible()


def test_a_thousand_peers_are_a_page_of_rows(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(1_000)).url}#swarm")
    expect(page.get_by_text("1 to 25 of 1,000 other nodes.")).to_be_visible()
    expect(rows(page)).to_have_count(MOST_ROWS)
    assert page.evaluate("document.querySelectorAll('*').length") < 1_500
    bottom = page.get_by_role("navigation", name="Pages of the list, bottom")
    bottom.get_by_role("button", name="Next page").click()
    expect(page.get_by_text("26 to 50 of 1,000 other nodes.")).to_be_visible()
    expect(bottom.get_by_role("button", name="Next page")).to_be_focused()
    bottom.get_by_role("button", name="Last page").click()
    expect(page.get_by_text("976 to 1,000 of 1,000 other nodes.")).to_be_visible()
    expect(bottom.get_by_role("button", name="Next page")).to_be_disabled()
    expect(rows(page).nth(0)).to_contain_text("This computer")


def test_one_of_a_thousand_is_found(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(1_000)).url}#swarm")
    expect(rows(page)).to_have_count(MOST_ROWS)
    page.get_by_label("Find").fill(peer_id(777))
    expect(page.get_by_text("1 other node found", exact=False)).to_have_count(0)
    expect(page.get_by_text("1 found among 1,000 other nodes.")).to_be_visible()
    expect(rows(page)).to_have_count(2)
    expect(rows(page).nth(1)).to_contain_text(shown(777))
    page.get_by_label("Find").fill("relayed paused")
    expect(page.get_by_text("1 to 25 of 50 found among 1,000 other nodes.")).to_be_visible()
    page.get_by_label("Find").fill("no such node")
    expect(page.get_by_text("None found among 1,000 other nodes.")).to_be_visible()
    expect(rows(page)).to_have_count(1)


def test_the_list_can_be_ordered(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(30)).url}#swarm")
    for order, first, column, direction in (
        ("Fastest", 0, "Tokens/s", "descending"),
        ("Lowest loss", 0, "Loss", "ascending"),
        ("Longest here", 29, "Since", "ascending"),
        ("Newest", 0, "Since", "descending"),
        ("Most traffic", 29, "Traffic", "descending"),
        ("Nearest", 0, "Connection", "ascending"),
    ):
        page.get_by_label("Order").select_option(order)
        expect(page.get_by_role("columnheader", name=column)).to_have_attribute("aria-sort", direction)
        expect(page.locator("th[aria-sort]")).to_have_count(1)
        expect(rows(page).nth(1)).to_contain_text(shown(first))


def test_those_at_work_come_first(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(10)).url}#swarm")
    expect(rows(page)).to_have_count(11)
    words = rows(page).locator("td:nth-of-type(1)").all_inner_texts()
    assert [text.split("\n")[0].strip() for text in words[1:]] == ["Training"] * 8 + ["Paused"] * 2


def test_the_list_follows_the_network(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(among(2))
    page = open_page(f"{node.url}#swarm")
    expect(rows(page)).to_have_count(3)
    node.publish(lambda _: among(3))
    expect(rows(page)).to_have_count(4)
    expect(page.locator("#swarm-sentence")).to_contain_text("You and 3 others")
    node.publish(swarm_snapshots.later)
    expect(rows(page).nth(1)).to_contain_text("901")
    node.publish(lambda status: replace(status, peers=status.peers[:1]))
    expect(rows(page)).to_have_count(2)
    node.publish(lambda _: swarm_snapshots.alone())
    expect(page.get_by_role("heading", name="Invite a friend")).to_be_visible()


def test_alone_it_says_how_to_invite_a_friend(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(swarm_snapshots.alone()).url}#swarm")
    expect(page.get_by_role("heading", level=2, name="Nobody else is in this run yet.")).to_be_visible()
    card = page.get_by_role("region", name="Invite a friend")
    expect(card.get_by_role("listitem")).to_have_count(3)
    expect(card).to_contain_text(JOIN_LINE)
    expect(card.get_by_role("button", name="Copy: Join line")).to_be_visible()
    assert page.get_by_role("table").count() == 0
    assert card.get_by_text("lead to this computer itself").count() == 0


def test_a_line_with_a_folder_of_here_says_what_others_need(start_node: StartNode, open_page: OpenPage) -> None:
    status = swarm_snapshots.alone()
    node = start_node(replace(status, network=replace(status.network, join_line=f"{JOIN_LINE} --genesis '/my data'")))
    page = open_page(f"{node.url}#swarm")
    words = page.get_by_text("The data is in a folder of this computer")
    expect(words).to_be_visible()
    line = f"{JOIN_LINE} --genesis https://data.example.org"
    node.publish(lambda _: replace(status, network=replace(status.network, join_line=line)))
    expect(words).to_have_count(0)


def test_an_address_nobody_else_can_reach_is_named_as_such(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(swarm_snapshots.alone('/ip4/127.0.0.1/tcp/4001')).url}#swarm")
    expect(page.get_by_text("The addresses of this node lead to this computer itself")).to_be_visible()


def test_the_check_of_the_organiser_is_shown(start_node: StartNode, open_page: OpenPage) -> None:
    status = among(4)
    node = start_node(status)
    page = open_page(f"{node.url}#swarm")
    words = page.get_by_text("from outside")
    expect(page.get_by_role("region", name="Invite others").get_by_role("listitem").first).to_be_visible()
    expect(words).to_have_count(0)
    for reachable, sentence in (
        (True, "The organiser of the run reached this computer from outside."),
        (False, "The organiser of the run did not reach this computer from outside."),
    ):
        network = replace(status.network, reachable=reachable)
        node.publish(lambda _, network=network: replace(status, network=network))
        expect(words).to_contain_text(sentence)


def test_a_network_that_is_not_there_is_explained(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url)
    for network, sentence in (
        (NetworkStatus(), "The network is off: this computer works on its own."),
        (NetworkStatus(NetworkState.STARTING, "Opening the port."), "Looking for other computers…"),
        (NetworkStatus(NetworkState.FAILED, "No route."), "The network does not work right now."),
    ):
        show_afresh(node, page, replace(snapshots.training(), network=network), "swarm")
        expect(page.locator("#swarm-sentence")).to_contain_text(sentence)
        expect(page.get_by_text(network.explanation, exact=True)).to_be_visible()
        expect(page.get_by_role("button", name="Copy")).to_have_count(0)


def test_a_paused_computer_is_not_counted_at_work(start_node: StartNode, open_page: OpenPage) -> None:
    status = among(4)
    assert status.swarm is not None
    paused = replace(status, state=NodeState.PAUSED, swarm=replace(status.swarm, training_nodes=4))
    page = open_page(f"{start_node(paused).url}#swarm")
    sentence = "4 others train this run, 17,263 tokens per second; this computer does not train now."
    expect(page.get_by_role("heading", level=2, name=sentence, exact=True)).to_be_visible()


def test_what_a_peer_says_is_only_text(start_node: StartNode, open_page: OpenPage) -> None:
    status = among(1)
    nasty = replace(status.peers[0], state="constructor", address="<img src=x onerror=alert(1)>" * 3)
    page = open_page(f"{start_node(replace(status, peers=(nasty,))).url}#swarm")
    expect(rows(page).nth(1)).to_contain_text("No report yet")
    expect(rows(page).nth(1)).to_contain_text("<img src=x")
    assert page.locator("td img").count() == 0


def test_home_has_the_network_in_one_line(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(among(6))
    page = open_page(node.url)
    others = page.get_by_role("region", name="Other computers")
    expect(others.locator("p").first).to_contain_text("7")
    expect(others).to_contain_text("computers train now.")
    expect(others.locator("dt")).to_have_count(4)
    expect(others.get_by_role("link", name="Invite a computer")).to_have_attribute("href", "#/invite")
    others.get_by_role("link", name="All").click()
    expect(page.get_by_role("heading", level=1, name="Network")).to_be_visible()
    node.publish(lambda _: swarm_snapshots.alone())
    page.get_by_role("link", name="Home").click()
    expect(others).to_contain_text("Nobody else is in this run yet.")
    node.publish(lambda status: replace(status, network=replace(status.network, state=NetworkState.OFF)))
    expect(others).to_contain_text("The network is off.")


def test_the_training_view_adds_up_the_network(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(1_000)).url}#training")
    values = {"Training nodes": "801", "Global loss": "3.512", "Total steps": "761,264", "Data shards": "16"}
    for name, value in {**values, "Model convergence": "Verified"}.items():
        expect(stat(page, name).locator(".stat-value")).to_have_text(value)
    nodes = page.get_by_role("region", name="Nodes").locator("tbody tr")
    expect(nodes).to_have_count(11)
    page.get_by_role("link", name="All 1,001 nodes").click()
    expect(page.get_by_text("1 to 25 of 1,000 other nodes.")).to_be_visible()
