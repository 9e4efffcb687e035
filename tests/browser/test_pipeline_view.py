"""The Pipeline view: the stages and who holds them, what is missing, the way of the microbatches, the bottleneck."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import snapshots
import swarm_snapshots
from dashboard_session import OpenPage, StartNode, stat
from playwright.sync_api import Locator, Page, expect
from swarm_snapshots import ME, TAKEN_OVER, driver, gap, peer_id, resting, silent, trainer, worker

from neuroshard.status.data import DataStatus
from neuroshard.status.pipeline import PipelineStage, StateCopyStatus
from neuroshard.status.snapshot import NodeState, NodeStatus

pytestmark = pytest.mark.browser


def short(node_id: str) -> str:
    return f"{node_id[:8]}…{node_id[-6:]}"


def stage_box(page: Page, number: int) -> Locator:
    return page.get_by_role("radio", name=re.compile(rf"^Stage {number} "))


def with_stages(status: NodeStatus, *stages: PipelineStage) -> NodeStatus:
    assert status.pipeline is not None
    return replace(status, pipeline=replace(status.pipeline, stages=stages))


def test_three_stages_in_one_sentence_and_three_boxes(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(driver()).url}#pipeline")
    expect(page.locator("#title-pipeline")).to_be_focused()
    sentence = "The model is cut into 3 stages, and every one of them is held."
    expect(page.get_by_role("heading", level=2, name=sentence, exact=True)).to_be_visible()
    expect(page.get_by_text("It holds stage 1, layers 1\N{EN DASH}4 of 12.", exact=True)).to_be_visible()
    expect(page.get_by_text("Every stage is on one computer only. When one leaves")).to_be_visible()
    boxes = page.get_by_role("region", name="Stages", exact=True).get_by_role("radio")
    expect(boxes).to_have_count(3)
    names = [
        re.compile(text)
        for text in (
            "layers 1\N{EN DASH}4 1 computer this computer",
            "layers 5\N{EN DASH}8 1 computer",
            "9\N{EN DASH}12",
        )
    ]
    for number, name in enumerate(names):
        expect(boxes.nth(number)).to_have_accessible_name(name)
    expect(stage_box(page, 1)).to_be_checked()


@pytest.mark.parametrize(
    ("ages", "summary", "chosen"),
    [
        ((12.0, 40.0, 5.0), "The oldest of their second copies is 40 s old.", "Second copy 40 s old"),
        ((12.0, None, 5.0), "No second copy yet of stage 2.", "No second copy yet."),
    ],
)
def test_the_age_of_second_copies_is_told(
    start_node: StartNode, open_page: OpenPage, ages: tuple[float | None, ...], summary: str, chosen: str
) -> None:
    status = driver()
    assert status.pipeline is not None
    stages = [
        replace(stage, copy=StateCopyStatus(age)) for stage, age in zip(status.pipeline.stages, ages, strict=True)
    ]
    page = open_page(f"{start_node(with_stages(status, *stages)).url}#pipeline")
    expect(page.get_by_text(summary)).to_be_visible()
    stage_box(page, 2).press("Space")
    expect(page.get_by_role("region", name="Who holds stage 2", exact=True)).to_contain_text(chosen)


def test_a_chosen_stage_tells_its_holders(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(driver()).url}#pipeline")
    stage_box(page, 2).press("Space")
    panel = page.get_by_role("region", name="Who holds stage 2", exact=True)
    for words in ("Stage 2, layers 5\N{EN DASH}8", "1 computer can work on it.", f"{short(peer_id(1))} can work"):
        expect(panel).to_contain_text(words)
    stage_box(page, 1).press("Space")
    expect(page.get_by_role("region", name="Who holds stage 1", exact=True)).to_contain_text(
        f"{short(ME)} can work, this computer"
    )


def test_holders_are_told_by_what_they_do(start_node: StartNode, open_page: OpenPage) -> None:
    status = driver()
    assert status.pipeline is not None
    first, middle, last = status.pipeline.stages
    many = replace(middle, ready=(peer_id(1), peer_id(2)), paused=(peer_id(3),), joining=(peer_id(4), peer_id(5)))
    page = open_page(f"{start_node(with_stages(status, first, many, last)).url}#pipeline")
    expect(stage_box(page, 2)).to_have_accessible_name(re.compile("3 computers"))
    stage_box(page, 2).press("Space")
    panel = page.get_by_role("region", name="Who holds stage 2", exact=True)
    sentence = "2 computers can work on it, 1 computer is paused and 2 computers get ready for it."
    expect(panel).to_contain_text(sentence)
    for words in (f"{short(peer_id(2))} can work", f"{short(peer_id(3))} paused", f"{short(peer_id(5))} gets ready"):
        expect(panel).to_contain_text(words)


def test_missing_layers_are_a_clear_warning(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(gap()).url}#pipeline")
    sentence = "Nobody holds layers 9\N{EN DASH}12 yet. Training waits for a computer that takes them."
    expect(page.get_by_role("heading", level=2, name=sentence, exact=True)).to_be_visible()
    expect(page.locator(".verdict.tone-bad")).to_be_visible()
    expect(stage_box(page, 3)).to_be_checked()
    expect(stage_box(page, 3)).to_have_accessible_name("Stage 3 layers 9\N{EN DASH}12 getting ready")
    expect(page.get_by_text("Nobody can work on it now and 1 computer gets ready for it.")).to_be_visible()
    expect(page.get_by_text("No microbatch has gone through all stages yet.")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)  # the view itself says it
    expect(page.get_by_role("link", name="Invite one")).to_have_attribute("href", "#/invite")


def test_the_overview_says_which_layers_nobody_holds(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(gap())
    page = open_page(node.url)
    expect(page.get_by_role("heading", level=1)).to_have_text(
        "Your computer is ready, but nobody holds layers 9\N{EN DASH}12 yet."
    )
    expect(page.get_by_role("banner").get_by_role("status")).to_have_text("Waiting for layers")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text(
        "Nobody holds layers 9\N{EN DASH}12 yet. Training resumes by itself as soon as another computer takes them."
    )
    alert.get_by_role("link", name="The stages").click()
    expect(page.locator("#title-pipeline")).to_be_focused()
    node.publish(lambda _: driver())
    expect(page.locator("#pipeline-sentence")).to_contain_text("every one of them is held")
    page.get_by_role("link", name="Home").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("teaching a language model")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_computer_that_nobody_asks_anything_is_ready_and_says_why(start_node: StartNode, open_page: OpenPage) -> None:
    why = "No computer that feeds text to the model sends anything at present."
    node = start_node(replace(worker(), state_reason=why, is_standing_by=True))
    page = open_page(node.url)
    headline = page.get_by_role("heading", level=1)
    expect(headline).to_have_text("Your computer is ready, and there is nothing for it to do at present.")
    expect(page.get_by_text(why)).to_be_visible()
    node.publish(lambda _: replace(worker(), state_reason=why))
    expect(headline).to_contain_text("teaching a language model")
    expect(page.get_by_text(why)).to_have_count(0)


def test_several_gaps_are_all_named(start_node: StartNode, open_page: OpenPage) -> None:
    status = gap()
    assert status.pipeline is not None
    first, middle, last = status.pipeline.stages
    node = start_node(with_stages(status, replace(first, ready=()), middle, last))
    page = open_page(node.url)
    headline = page.get_by_role("heading", level=1)
    expect(headline).to_have_text(
        "Your computer is ready, but nobody holds layers 1\N{EN DASH}4 and 9\N{EN DASH}12 yet."
    )
    other = "All nodes that hold a stage fail; this node tries them again."
    node.publish(lambda _: replace(driver(), state=NodeState.WAITING_FOR_STAGES, state_reason=other))
    expect(headline).to_have_text("Your computer is ready, but it waits for others that hold the rest of the model.")
    expect(page.get_by_role("alert")).to_contain_text(other)


def test_a_waiting_peer_is_told_in_the_list_of_nodes(start_node: StartNode, open_page: OpenPage) -> None:
    status = driver()
    waiting = replace(status.peers[0], state=NodeState.WAITING_FOR_STAGES)
    page = open_page(f"{start_node(replace(status, peers=(waiting, *status.peers[1:]))).url}#swarm")
    expect(page.get_by_role("region", name="Nodes of this run")).to_contain_text("Waiting for layers")


def test_a_stage_whose_holders_rest_is_told(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(resting()).url}#pipeline")
    sentence = "Every computer that holds stage 2 is paused. Training waits until one resumes."
    expect(page.get_by_role("heading", level=2, name=sentence, exact=True)).to_be_visible()
    expect(stage_box(page, 2)).to_have_accessible_name("Stage 2 layers 5\N{EN DASH}8 all paused")
    expect(stage_box(page, 2)).to_be_checked()


def test_a_stage_whose_holders_do_not_answer_is_told(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(silent())
    page = open_page(f"{node.url}#pipeline")
    sentence = "Nobody who holds stage 2 answers. Training waits while they are asked again."
    expect(page.get_by_role("heading", level=2, name=sentence, exact=True)).to_be_visible()
    expect(stage_box(page, 2)).to_have_accessible_name("Stage 2 layers 5\N{EN DASH}8 no answer")
    expect(stage_box(page, 2)).to_be_checked()
    panel = page.get_by_role("region", name="Who holds stage 2", exact=True)
    for words in ("1 computer does not answer.", f"{short(peer_id(1))} does not answer"):
        expect(panel).to_contain_text(words)
    page.get_by_role("link", name="Home").click()
    expect(page.get_by_role("alert")).to_contain_text("All nodes that hold a stage fail; this node tries them again.")


def test_a_trainer_holds_nothing_and_tells_the_way(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(trainer()).url}#pipeline")
    expect(
        page.get_by_text("It holds no layers: it drives microbatches through those of others.", exact=True)
    ).to_be_visible()
    expect(page.get_by_role("region", name="The last microbatches")).to_be_visible()
    expect(page.get_by_role("region", name="Stages on this computer")).to_have_count(0)


def test_a_node_that_needs_no_text_is_not_warned_of_it(start_node: StartNode, open_page: OpenPage) -> None:
    needless = "These layers need no data: others drive them."
    data = DataStatus("", verified=False, explanation=needless)
    page = open_page(start_node(replace(worker(), is_demo=False, data=data)).url)
    expect(page.get_by_text("Unverified data.")).to_have_count(0)
    page.get_by_role("link", name="Files").click()
    expect(page.get_by_role("region", name="Training text")).to_contain_text(needless)
    expect(page.get_by_role("region", name="Source")).to_have_count(0)


def test_six_numbers_each_with_a_sentence(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(driver()).url}#pipeline")
    for name, value, words in (
        ("Tokens per second", "546", "through all stages: 32 microbatches in 60 s"),
        ("Idle (Bubble)", "91 %", "did nothing for these microbatches"),
        ("Busiest upload per token", "512 B", "Stages send activations to each other"),
        ("Recomputed", "0 %", "of the work is done twice"),
        ("Replacements", "3", "2 exact, 1 approximate"),
        ("Failed requests", "4", "after each the node chose another replica; 0 microbatches given up"),
    ):
        expect(stat(page, name).locator(".stat-value")).to_have_text(value)
        expect(stat(page, name)).to_contain_text(words)


def test_the_bottleneck_is_named_and_marked(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(driver()).url}#pipeline")
    card = page.get_by_role("region", name="Where time goes")
    expect(card).to_contain_text(
        f"Stage 2 is the bottleneck, slowest on {short(peer_id(1))}: "
        "a microbatch spends 750 ms there, at work or waiting, 67 % of its time at all stages."
    )
    rows = card.get_by_role("list", name="Mean time at each stage").get_by_role("listitem")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("bottleneck")
    expect(rows.nth(1)).to_contain_text("781 ms (250 ms at work, 500 ms waiting, 31 ms on the way)")
    expect(rows.nth(0)).to_contain_text("188 ms (125 ms at work, 63 ms waiting)")
    widths = "all => all.map((e) => [...e.children].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0))"
    first, second, _ = rows.locator(".parts").evaluate_all(widths)
    assert first / second == pytest.approx(0.1875 / 0.78125, rel=0.02)  # the longest one fills its row


def test_the_way_of_a_microbatch_stage_by_stage(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(driver())
    page = open_page(f"{node.url}#pipeline")
    card = page.get_by_role("region", name="The last microbatches")
    columns = card.get_by_role("radio")
    expect(columns).to_have_count(32)
    expect(columns.nth(31)).to_be_checked()
    area = "all => all.map((e) => e.getBoundingClientRect()).map((box) => [box.width, box.height])"
    drawn = [box for box in card.locator(".column .part").evaluate_all(area) if min(box) > 2]
    assert len(drawn) >= 32  # each column can be seen
    expect(card.get_by_role("heading", name="The newest one, stage by stage")).to_be_visible()
    expect(card).to_contain_text("It took 1.19 s for 1,024 tokens.")
    rows = card.get_by_role("list", name="Time at each stage").get_by_role("listitem")
    expect(rows.nth(0)).to_contain_text("this computer")
    expect(rows.nth(2)).to_contain_text(short(peer_id(2)))
    columns.nth(TAKEN_OVER).press("Space")
    expect(card).to_contain_text("It took 1.69 s for 1,024 tokens, 500 ms of it between the stages.")
    expect(card).to_contain_text("1 request failed, so another computer was asked.")
    expect(card).to_contain_text(
        f"Stage 2 went from {short(peer_id(900))} to {short(peer_id(1))} (approximate: their weights may differ)."
    )
    expect(columns.nth(TAKEN_OVER)).to_have_accessible_name(re.compile(r"1\.69 s, \d+ s ago, 1 times another"))


def test_a_chosen_microbatch_stays_while_others_come(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(driver())
    page = open_page(f"{node.url}#pipeline")
    card = page.get_by_role("region", name="The last microbatches")
    columns = card.get_by_role("radio")
    columns.nth(TAKEN_OVER).press("Space")
    expect(card).to_contain_text("It took 1.69 s")

    def one_more(status: NodeStatus) -> NodeStatus:
        assert status.pipeline is not None
        assert status.pipeline.flow is not None
        recent = status.pipeline.flow.recent
        newest = replace(recent[-1], microbatch=recent[-1].microbatch + 1)
        flow = replace(status.pipeline.flow, recent=(*recent[1:], newest))
        return replace(status, pipeline=replace(status.pipeline, flow=flow))

    node.publish(one_more)
    expect(columns.nth(TAKEN_OVER - 1)).to_be_checked()
    expect(card).to_contain_text("It took 1.69 s")
    columns.nth(31).press("Space")
    node.publish(one_more)
    expect(card.get_by_role("heading", name="The newest one, stage by stage")).to_be_visible()
    expect(columns.nth(31)).to_be_checked()


def test_a_worker_tells_of_its_stage_and_where_the_way_is_told(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(worker()).url}#pipeline")
    expect(page.get_by_text("It holds stage 2, layers 5\N{EN DASH}8 of 12.", exact=True)).to_be_visible()
    expect(page.get_by_text("This computer works for others")).to_be_visible()
    assert page.locator("#pipeline .stat").count() == 0
    own = page.get_by_role("region", name="Stage 2", exact=True)
    expect(own.get_by_role("progressbar", name="Sequences for the next step")).to_have_attribute(
        "aria-valuetext", "3 of 8"
    )
    for words in ("Steps764", "Half done2 microbatches", "Sessions1 open", "Savedat step 750"):
        expect(own).to_contain_text(words)
    expect(own).not_to_contain_text("Loss")


def test_one_piece_is_told_as_such(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(swarm_snapshots.one_stage()).url}#pipeline")
    expect(page.locator("#pipeline-sentence")).to_have_text(
        "The model is in one piece: a computer that trains holds all of it."
    )
    expect(page.get_by_text("It holds the whole model.", exact=True)).to_be_visible()
    expect(page.get_by_text("bottleneck")).to_have_count(0)
    expect(page.get_by_text("on one computer only")).to_have_count(0)


def test_before_anything_is_known_it_says_so(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(snapshots.starting()).url}#pipeline")
    expect(page.locator("#pipeline-sentence")).to_have_text("The stages of the model are not known yet.")
