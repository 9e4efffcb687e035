"""A trainer in the dashboard: its own, and among the nodes of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dashboard_session import OpenPage, StartNode, rows
from playwright.sync_api import expect
from swarm_snapshots import among

from neuroshard.status.snapshot import NodeStatus
from neuroshard.types import Role

pytestmark = pytest.mark.browser


def with_trainers(status: NodeStatus) -> NodeStatus:
    """This node and the first of the others hold no layers; the second other one does not say yet what it does."""
    assert status.model is not None
    first, second, *others = status.peers
    return replace(
        status,
        model=replace(status.model, layers=None, roles=(Role.DRIVER,)),
        peers=(replace(first, layers=None, roles=(Role.DRIVER,)), replace(second, layers=None, roles=()), *others),
    )


def test_a_trainer_says_that_the_layers_are_elsewhere(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(with_trainers(among(4)))
    page = open_page(f"{node.url}#computer")
    card = page.get_by_role("region", name="This computer", exact=True)
    expect(card).to_contain_text("Trainer (feeds text in, the layers are on other computers)")
    expect(card).to_contain_text("no layers; the model has")


def test_trainers_stand_in_the_lists_of_nodes(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(with_trainers(among(4)))
    page = open_page(f"{node.url}#swarm")
    expect(rows(page).nth(0)).to_contain_text("trainer, no layers")
    expect(rows(page).nth(1)).to_contain_text("trainer, no layers, shard 0")
    expect(rows(page).filter(has_text="no layers")).to_have_count(2)
    page.goto(f"{node.url}#training")
    cells = page.get_by_role("cell", name="trainer", exact=True)
    expect(cells).to_have_count(2)
