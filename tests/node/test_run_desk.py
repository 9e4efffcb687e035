"""Two commands about a run at the same time: neither may undo what the other stores."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import trio

from neuroshard.config.run_parameters import RunParameters
from neuroshard.errors import UsageError
from neuroshard.identity import SignedRunParameters
from neuroshard.identity.invitations import Invitation, InvitationTerms, InvitedPlaces
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.node.process import StopRequest
from neuroshard.node.run_desk import RunDesk
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.knocking import KnockList, WaitingKnock
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.status.board import AnswerKnock, Invite
from tests.worlds.nodes import OWNER, PINS, SHAPE

SEED = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
PARAMETERS = RunParameters("test", 1, SHAPE, 3, 1, 4, 7, PINS, seeds=(SEED,))


@pytest.fixture
def offer() -> RunOffer:
    return RunOffer.of_new_run(SignedRunParameters.sign(OWNER, PARAMETERS))


def desk_in(folder: Path, offer: RunOffer, knocks: KnockList) -> RunDesk:
    configuration = SimpleNamespace(settings=SimpleNamespace(data_dir=folder, genesis=None))
    peer_network = SimpleNamespace(
        exchange=SimpleNamespace(followed=SimpleNamespace(offer=offer)),
        networking=SimpleNamespace(current=None),
        door=SimpleNamespace(knocks=knocks),
    )
    board = SimpleNamespace(current=lambda: SimpleNamespace(state="training"))
    publisher = SimpleNamespace(warn=lambda *_: None, end_warning=lambda _: None)
    parts = cast("Any", (configuration, OWNER, peer_network, board, StopRequest()))
    return RunDesk(*parts, is_demo=False, publisher=cast("Any", publisher))


def meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads stop after they have read the list of invitations, if both can come so far."""
    both, make = Barrier(2), StoredPasses._invite  # pyright: ignore[reportPrivateUsage]

    def invite_together(*given: Any) -> Invitation:
        with suppress(BrokenBarrierError):
            both.wait(timeout=0.3)
        return make(*given)

    monkeypatch.setattr(StoredPasses, "_invite", invite_together)


def test_two_invitations_at_once_are_both_listed(
    offer: RunOffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = desk_in(tmp_path, offer, KnockList())
    meet(monkeypatch)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for label in ("Ada", "Ben"):
                tasks.start_soon(desk.carry_out, Invite(label, uses=1, days=1.0, may_invite=False))

    trio.run(main)
    assert {one.label for one in StoredPasses(tmp_path, offer).issued().issued} == {"Ada", "Ben"}


def test_commands_of_several_processes_undo_nothing_of_each_other(offer: RunOffer, tmp_path: Path) -> None:
    """Each has files of its own open, as another process would; what one has read, another one changes meanwhile."""
    places, keys = InvitedPlaces(""), [bytes([number]) * 32 for number in range(1, 5)]
    start, makers = Barrier(len(keys)), [StoredFoundations(tmp_path) for _ in keys]

    def carry_out(number: int) -> None:
        start.wait()
        makers[number].name_deputy(offer, OWNER, keys[number])
        for day in (1, 2, 3):
            label = f"{number} {day}"
            StoredPasses(tmp_path, offer).issue(OWNER, InvitationTerms(time.time() + day * 86_400, 1, label), places)
            StoredPasses(tmp_path, offer).revoke(OWNER, label)

    with ThreadPoolExecutor(len(keys)) as threads:
        list(threads.map(carry_out, range(len(keys))))
    known = StoredFoundations(tmp_path).read(offer)
    assert set(known.deputies) == set(keys)
    assert not known.is_contradictory
    invitations = StoredPasses(tmp_path, offer).invitations(time.time())
    assert len(invitations) == 12
    assert {one.state for one in invitations} == {"revoked"}


def test_an_answer_that_is_given_twice_makes_one_invitation(
    offer: RunOffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knocks = KnockList()
    desk = desk_in(tmp_path, offer, knocks)
    meet(monkeypatch)
    wallet = bytes(range(32))
    knocks.waiting[wallet] = WaitingKnock(wallet, "laptop", 0.0, "192.0.2.7")
    refused = list[str]()

    async def answer() -> None:
        try:
            await desk.carry_out(AnswerKnock(wallet_id_of(wallet), is_allowed=True))
        except UsageError as error:
            refused.append(error.message)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer)
            tasks.start_soon(answer)

    trio.run(main)
    assert not knocks.waiting
    assert refused == ["This computer no longer asks to join."]
    assert len(StoredPasses(tmp_path, offer).issued().issued) == 1
