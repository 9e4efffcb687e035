"""Two commands about a run at the same time: neither may undo what the other stores."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import trio

from neuroshard.config.run_parameters import RunParameters
from neuroshard.config.settings import Settings
from neuroshard.errors import UsageError
from neuroshard.identity import SignedRunParameters
from neuroshard.identity.invitations import Invitation, InvitationTerms, InvitedPlaces, read_invitation
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.network.mdns import RunNotice
from neuroshard.node.process import StopRequest
from neuroshard.node.run_desk import RunDesk
from neuroshard.runs.authority_key import OrganiserAddress, organiser_address
from neuroshard.runs.chosen_run import ChosenRun, RunChoice
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.knocking import KnockList, WaitingKnock
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.status.board import AnswerKnock, Invite, JoinRun, ListMembers
from neuroshard.types import RunId
from neuroshard.waiting import Signal
from tests.worlds.nodes import OWNER, PINS, SHAPE

SEED = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
PARAMETERS = RunParameters("test", 1, SHAPE, 3, 1, 4, 7, PINS, seeds=(SEED,))


@pytest.fixture
def offer() -> RunOffer:
    return RunOffer.of_new_run(SignedRunParameters.sign(OWNER, PARAMETERS))


def desk_in(folder: Path, offer: RunOffer, knocks: KnockList, nearby: tuple[RunNotice, ...] | None = None) -> RunDesk:
    configuration = SimpleNamespace(settings=Settings(data_dir=folder), source_of=lambda _: "default")
    peer_network = SimpleNamespace(
        exchange=SimpleNamespace(followed=SimpleNamespace(offer=offer)),
        networking=SimpleNamespace(current=None),
        knocked=Signal(),
        door=SimpleNamespace(knocks=knocks),
    )
    board = SimpleNamespace(current=lambda: SimpleNamespace(state="training"))
    publisher = SimpleNamespace(warn=lambda *_: None, end_warning=lambda _: None)
    parts = cast("Any", (configuration, OWNER, peer_network, board, StopRequest()))
    heard = None if nearby is None else SimpleNamespace(current=nearby, look=lambda: None)
    return RunDesk(*parts, is_demo=False, publisher=cast("Any", publisher), nearby=cast("Any", heard))


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


def test_the_owner_of_an_organised_run_invites_with_its_organiser(tmp_path: Path) -> None:
    parameters = replace(PARAMETERS, admission="admitted", authority=("58" + 31 * "66",))
    organised = RunOffer.of_new_run(SignedRunParameters.sign(OWNER, parameters))
    url = "https://organiser.example"
    desk = desk_in(tmp_path, organised, KnockList())

    async def made(label: str) -> tuple[Invitation, dict[str, Any]]:
        found = (await desk.carry_out(Invite(label, uses=2, days=1.0, may_invite=False))).details
        listed = (await desk.carry_out(ListMembers())).details
        assert found is not None
        assert listed is not None
        return read_invitation(str(found["link"])), cast("dict[str, Any]", listed["run"])

    async def main() -> None:
        first, run = await made("Ada")
        assert (first.run_id, first.organiser, first.grant.uses) == (organised.run_id, None, 2)
        assert (run["is_owner"], run["may_invite"], run["has_deputies"]) == (True, True, False)
        organiser_address(tmp_path, organised.run_id).write(OrganiserAddress(url))
        second, run = await made("Ben")
        assert second.organiser == url
        assert [one["label"] for one in run["invitations"]] == ["Ada", "Ben"]
        second.check(organised.run_id, organised.initial.owner_public_key, time.time())

    trio.run(main)


def test_a_run_that_is_open_to_strangers_has_no_invitations(tmp_path: Path) -> None:
    parameters = replace(PARAMETERS, admission="strangers")
    desk = desk_in(tmp_path, RunOffer.of_new_run(SignedRunParameters.sign(OWNER, parameters)), KnockList())

    async def main() -> None:
        with pytest.raises(UsageError, match="needs no invitations"):
            await desk.carry_out(Invite("Ada", uses=1, days=1.0, may_invite=False))
        assert ((await desk.carry_out(ListMembers())).details or {})["run"] is None

    trio.run(main)


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


HOME = RunNotice(RunId("3" * 64), "home", 2)


def test_a_run_of_the_local_network_is_listed_and_joined_by_its_id(tmp_path: Path, offer: RunOffer) -> None:
    own = RunNotice(offer.run_id, "test", 1)
    desk = desk_in(tmp_path, offer, KnockList(), (own, HOME))

    async def main() -> None:
        listed = (await desk.carry_out(ListMembers())).details
        assert listed is not None
        assert listed["nearby"] == [{"run_id": HOME.run, "name": "home", "computers": 2}]  # not the run of this node
        await desk.carry_out(JoinRun(run_id=HOME.run))

    trio.run(main)
    assert RunChoice(tmp_path).current() == ChosenRun(HOME.run, "home")
    assert desk._stop.starts_again


@pytest.mark.parametrize("nearby", [None, (), (HOME,)])
def test_a_run_that_is_neither_known_nor_nearby_is_refused(
    tmp_path: Path, offer: RunOffer, nearby: tuple[RunNotice, ...] | None
) -> None:
    desk = desk_in(tmp_path, offer, KnockList(), nearby)

    async def main() -> None:
        assert ((await desk.carry_out(ListMembers())).details or {})["nearby"] == (
            None
            if nearby is None
            else [{"run_id": one.run, "name": one.name, "computers": one.computers} for one in nearby]
        )
        with pytest.raises(UsageError, match="neither known here nor on the local network"):
            await desk.carry_out(JoinRun(run_id="4" * 64))

    trio.run(main)
    assert RunChoice(tmp_path).current() is None
    assert not desk._stop.starts_again
