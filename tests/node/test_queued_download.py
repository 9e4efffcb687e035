"""A node in the queue of an organiser learns its right, shows its download, and keeps only the state of its stage."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import pytest

from neuroshard.identity.admissions import read_download_right
from neuroshard.node.data_sharing import open_data_store
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.node.queued_download import NOTE_FILE, QueuedDownload, QueuedStage
from neuroshard.runs.organiser_client import NEAR_POSITION, NEAR_SECONDS, QueuedForm, QueuePlace
from neuroshard.state.checkpoint_store import stage_folder
from neuroshard.types import LayerRange
from tests.node.test_organised_run import AUTHORITY, OFFER, Organised, Organiser, keeper_at, now, play

LAYERS, OTHERS = LayerRange(0, 2), LayerRange(2, 4)
WAITING = QueuedForm("request", "token", position=1)


def test_a_queued_node_gets_a_new_right_with_each_poll_and_shows_its_download(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        organiser = Organiser(wanted=1)
        first, second = await world.started(1, 2, admitted=False)
        await keeper_at(first, organiser).admit(lambda _: None)
        place, reports, ends = QueuePlace(), list[str](), list[int]()
        world.tasks.start_soon(keeper_at(second, organiser).admit, reports.append, place)
        for _ in range(3):
            await place.changed.wait()
            assert place.waiting is not None
            assert place.waiting.right is not None
            right = read_download_right(place.waiting.right, OFFER.run_id, [AUTHORITY.public_key], now())
            assert (right.node, right.layers) == (second.identity.node_id, LAYERS)
            ends.append(right.expires_at)
        assert ends == sorted(set(ends))
        place.show("The tokenizer is here.")
        assert reports[-1].startswith("Waiting for a place in the run: number 1 in the queue.")
        assert reports[-1].endswith("The tokenizer is here.")
        await anyio.sleep(15)
        assert reports[-1].endswith("The tokenizer is here.")  # also after the next poll
        organiser.database.close()

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("position", "wait", "is_near"),
    [
        (NEAR_POSITION, None, True),
        (NEAR_POSITION + 1, None, False),
        (8, NEAR_SECONDS, True),
        (8, NEAR_SECONDS + 1, False),
    ],
)
def test_the_admission_is_near_by_the_position_or_by_the_time(position: int, wait: float | None, is_near: bool) -> None:
    found = msgspec.structs.replace(WAITING, position=position, estimated_wait_seconds=wait)
    assert found.is_near == is_near


def test_a_right_that_cannot_be_read_is_none() -> None:
    assert msgspec.structs.replace(WAITING, download_right="not base64").right is None
    assert WAITING.right is None


def downloaded(node: PeerNetwork, *, is_noted: bool) -> Path:
    """The folder of a stage with a state, which the node downloaded in the queue or has trained."""
    folder = stage_folder(node.settings.data_dir, node.identity.wallet_id, OFFER.run_id, LAYERS)
    folder.mkdir(parents=True)
    (folder / "step-10.json").write_text("{}")
    if is_noted:
        (folder.parent / NOTE_FILE).write_bytes(msgspec.json.encode(QueuedStage(LAYERS)))
    return folder


@pytest.mark.parametrize(
    ("is_noted", "admitted", "stays"),
    [(True, LAYERS, True), (True, OTHERS, False), (True, None, False), (False, OTHERS, True)],
)
def test_only_the_downloaded_state_of_another_stage_is_removed(
    tmp_path: Path, is_noted: bool, admitted: LayerRange | None, stays: bool
) -> None:
    """A start continues with the stages on its disk. The organiser may have given the node another one meanwhile."""

    async def scenario(world: Organised) -> None:
        (node,) = await world.started(1)
        folder = downloaded(node, is_noted=is_noted)
        QueuedDownload(node.settings, node, open_data_store(node.settings), 1000).settle(OFFER, admitted)
        assert folder.exists() == stays
        assert not (folder.parent / NOTE_FILE).exists()  # from now on the state is the node's own

    play(tmp_path, scenario)
