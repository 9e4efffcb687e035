"""An organised run serves nodes that its organiser admits, and goes on without the organiser."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import trio
from trio.testing import MockClock

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.config.settings import Settings
from neuroshard.config.state_file import StateFile
from neuroshard.errors import NeuroShardError, StorageError
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet, read_claim
from neuroshard.identity.admissions import (
    ADMISSION_GRACE_SECONDS,
    ADMISSION_SECONDS,
    MAX_JOIN_BYTES,
    Admission,
    AdmissionRevocation,
    JoinClaim,
    sign_admission,
    sign_admission_revocation,
)
from neuroshard.identity.signing import SigningKey
from neuroshard.membership.connectivity import Networking
from neuroshard.membership.run_members import RunMembers
from neuroshard.messages import Frame
from neuroshard.network import InMemoryNetwork, Network, PeerRefusedError
from neuroshard.node.peer_network import ADMISSIONS_SECONDS, PeerNetwork
from neuroshard.organiser.application import OrganiserContext, create_organiser_app
from neuroshard.organiser.database import Database
from neuroshard.organiser.desk import AdmissionDesk, RunPlan
from neuroshard.organiser.ended_passes import EndedPasses
from neuroshard.organiser.places import StagePlaces
from neuroshard.runs import admission_keeper
from neuroshard.runs.admission_keeper import AdmissionKeeper, admission_file, keeper_of
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.organiser_client import OrganiserClient
from neuroshard.state.replica_status import REPLICA_STATUS
from neuroshard.types import LayerRange, NodeId
from tests.node.test_closed_run import SHAPE, ids, peers_of, status, until
from tests.worlds.claims import identity_of
from tests.worlds.clock import at_once

START = 1_800_000_000.0
OWNER = Wallet.from_secret(TokenSecret("hex", (1).to_bytes(32, "big")))  # of node 0
AUTHORITY = SigningKey.from_seed(b"authority".ljust(32, b"\0"))
PARAMETERS = RunParameters(
    "test",
    1,
    SHAPE,
    1,
    4,
    8,
    7,
    GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 512),
    admission="admitted",
    authority=(AUTHORITY.public_key.hex(),),
)
OFFER = RunOffer.of_new_run(SignedRunParameters.sign(OWNER, PARAMETERS))
STRANGER = 9


def now() -> float:
    return START + anyio.current_time()


def admission_of(number: int, at: float | None = None, authority: SigningKey = AUTHORITY) -> bytes:
    """The admission of a node, as an organiser signs it at a time."""
    me, admitted_at = identity_of(number), int(now() if at is None else at)
    end = admitted_at + ADMISSION_SECONDS
    made = Admission(OFFER.run_id, me.node_id, me.wallet_id, "head-0", LayerRange(0, 2), 1, admitted_at, end)
    return sign_admission(authority, made)


@dataclass
class Organised:
    """Nodes of one organised run. Node 0 is the owner's, which needs no admission."""

    folder: Path
    network: InMemoryNetwork
    tasks: Any
    ended: set[int] = field(default_factory=set[int])

    def node(self, number: int) -> PeerNetwork:
        me = identity_of(number)

        @asynccontextmanager
        async def opened() -> AsyncGenerator[Network]:
            self.network.join(me.node_id)
            try:
                yield self.network.network_of(me.node_id)
            finally:
                self.network.kill(me.node_id)

        chosen = Settings(data_dir=self.folder / f"node-{number}", p2p_host="127.0.0.1")
        chosen.data_dir.mkdir(parents=True, exist_ok=True)
        return PeerNetwork.of(chosen, me, opened, now, offload=at_once)

    async def started(self, *numbers: int, admitted: bool = True) -> list[PeerNetwork]:
        nodes = [self.node(number) for number in numbers]
        for number, node in zip(numbers, nodes, strict=True):
            node.serve(OFFER, status, is_shared=True)
            if admitted and number:
                renew(node, admission_of(number))
            self.tasks.start_soon(node.networking.run)
        return nodes


def renew(node: PeerNetwork, admission: bytes, ended: tuple[bytes, ...] = ()) -> None:
    assert node.joined is not None
    assert node.joined.members is not None
    node.joined.members.renew(admission, ended)


def refusal_at(node: PeerNetwork, other: NodeId) -> str:
    assert node.joined is not None
    assert node.joined.members is not None
    return node.joined.members.refusal(other)


def play(folder: Path, scenario: Callable[[Organised], Awaitable[None]], days: float = 1.0) -> None:
    """Run a scenario with virtual time."""

    async def main() -> None:
        with InMemoryNetwork() as network, anyio.fail_after(days * 86_400):
            async with anyio.create_task_group() as tasks:
                await scenario(Organised(folder, network, tasks))
                tasks.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_admitted_nodes_meet_and_a_stranger_stays_outside(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        members = await world.started(0, 1, 2)
        (stranger,) = await world.started(STRANGER, admitted=False)
        await until(5, lambda: all(len(peers_of(member)) == 2 for member in members))
        await anyio.sleep(60)
        assert [peers_of(member) for member in members] == [ids(1, 2), ids(0, 2), ids(0, 1)]
        assert stranger.joined is not None
        assert not stranger.joined.participant.membership.view.members.keys() & ids(0, 1, 2)
        renew(stranger, admission_of(STRANGER))
        await until(330, lambda: all(ids(STRANGER) <= peers_of(member) for member in members))

    play(tmp_path, scenario)


@pytest.mark.parametrize("shown", ["none", "expired", "of another node", "of no authority"])
def test_a_node_without_a_live_admission_of_its_own_gets_no_answer(tmp_path: Path, shown: str) -> None:
    async def scenario(world: Organised) -> None:
        await world.started(0, 1)
        (stranger,) = await world.started(STRANGER, admitted=False)
        assert stranger.joined is not None
        assert stranger.joined.members is not None
        stranger.joined.members.own_admission = {
            "none": None,
            "expired": admission_of(STRANGER, now() - ADMISSION_SECONDS - 1),
            "of another node": admission_of(1),
            "of no authority": admission_of(STRANGER, authority=SigningKey.from_seed(bytes(32))),
        }[shown]
        await anyio.sleep(30)
        line = world.network.network_of(identity_of(STRANGER).node_id).transport
        for peer in sorted(ids(0, 1)):
            with pytest.raises(PeerRefusedError, match="admission"):
                await line.request(peer, Frame(REPLICA_STATUS), timeout_seconds=60)

    play(tmp_path, scenario)


def test_a_member_that_nobody_refreshes_is_refused_after_its_hour(tmp_path: Path) -> None:
    """The organiser is alive: it refreshes another member."""

    async def scenario(world: Organised) -> None:
        members = await world.started(0, 1, 2)
        await until(5, lambda: all(len(peers_of(member)) == 2 for member in members))
        for _ in range(3):
            await anyio.sleep(ADMISSION_SECONDS / 2)
            renew(members[1], admission_of(1))
        await anyio.sleep(120)
        assert "has expired" in refusal_at(members[0], identity_of(2).node_id)
        assert peers_of(members[0]) == ids(1)
        renew(members[2], admission_of(2))
        await until(700, lambda: peers_of(members[0]) == ids(1, 2))

    play(tmp_path, scenario)


def test_members_work_on_without_the_organiser_until_the_grace_time_ends(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        members = await world.started(0, 1, 2)
        await until(5, lambda: all(len(peers_of(member)) == 2 for member in members))
        known = [identity_of(number).node_id for number in (1, 2)]
        (late,) = await world.started(STRANGER, admitted=False)
        for hours in (0.9, 0.5):
            await anyio.sleep(hours * 3600)
            assert [refusal_at(members[0], node) for node in known] == ["", ""]
            assert all(len(peers_of(member)) == 2 for member in members)
        assert peers_of(late) <= ids(0)  # newcomers wait
        members_of = members[0].joined
        assert members_of is not None
        assert members_of.members is not None
        members_of.members.now = lambda: now() + ADMISSION_GRACE_SECONDS
        assert all("has expired" in refusal_at(members[0], node) for node in known)

    play(tmp_path, scenario)


def test_a_restarted_member_knows_the_others_while_the_organiser_is_dead(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        await world.started(1, 2)
        again = world.node(3)
        again.serve(OFFER, status, is_shared=True)
        renew(again, admission_of(3))
        with anyio.move_on_after(2 * ADMISSIONS_SECONDS):
            await again.networking.run()
        await anyio.sleep(2 * ADMISSION_SECONDS)
        third = world.node(3)
        third.serve(OFFER, status, is_shared=True)
        world.tasks.start_soon(third.networking.run)
        await until(60, lambda: peers_of(third) == ids(1, 2))

    play(tmp_path, scenario)


def test_a_revocation_of_the_organiser_reaches_all_members(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        members = await world.started(0, 1, 2, 3)
        await until(5, lambda: all(len(peers_of(member)) == 3 for member in members))
        statement = AdmissionRevocation(OFFER.run_id, identity_of(3).node_id, None, "proof", int(now()))
        renew(members[1], admission_of(1), (sign_admission_revocation(AUTHORITY, statement),))
        await until(60, lambda: all(not ids(3) & peers_of(member) for member in members[:3]))
        renew(members[3], admission_of(3))
        await anyio.sleep(60)
        assert all("ended the place" in refusal_at(member, identity_of(3).node_id) for member in members[:3])

    play(tmp_path, scenario)


class Organiser(httpx.AsyncBaseTransport):
    """The organiser's application, which may be dead. The run has one stage."""

    def __init__(self, wanted: int = 2) -> None:
        names, plan = count(), RunPlan(OFFER, (StagePlaces("head-0", LayerRange(0, 2), 1000, wanted),))
        self.database = Database(None)
        self.desk = AdmissionDesk(
            plan,
            AUTHORITY,
            self.database,
            EndedPasses(OFFER, None),
            now=now,
            monotonic=anyio.current_time,
            random_name=lambda: f"{next(names)}",
        )
        app = create_organiser_app(OrganiserContext(plan, self.desk, now, anyio.current_time, offload=at_once))
        self._inner = httpx.ASGITransport(app)
        self.is_dead = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.is_dead:
            raise httpx.ConnectError("refused")
        return await self._inner.handle_async_request(request)


def keeper_at(
    node: PeerNetwork, transport: httpx.AsyncBaseTransport, networking: Networking | None = None
) -> AdmissionKeeper:
    url, claim = "http://organiser", JoinClaim(OFFER.run_id, memory_mb=4000)
    client = OrganiserClient(
        url, node.identity, lambda: OFFER, claim, now, open_http=lambda: httpx.AsyncClient(transport=transport)
    )
    return AdmissionKeeper(client, url, admission_file(node.settings.data_dir, OFFER), now, networking)


def test_addresses_that_failed_before_the_admission_are_dialled_again_at_once(tmp_path: Path) -> None:
    """The relay of the run connects only admitted nodes."""

    async def scenario(world: Organised) -> None:
        organiser, node = Organiser(), world.node(1)
        book, relayed = node.networking.book, f"/ip4/203.0.113.1/tcp/4001/p2p/{identity_of(5).node_id}"
        book.add([relayed])
        for _ in range(9):
            book.note_failure(relayed, anyio.current_time())
        assert book.due(anyio.current_time(), ()) == ()
        keeper = keeper_at(node, organiser, node.networking)
        world.tasks.start_soon(node.networking.run)
        await keeper.admit(lambda _: None)
        assert [address.text for address in book.due(anyio.current_time(), ())] == [relayed]
        organiser.database.close()

    play(tmp_path, scenario)


def members_at(node: PeerNetwork) -> RunMembers:
    assert node.joined is not None
    assert node.joined.members is not None
    return node.joined.members


@pytest.mark.parametrize(("holds_layers", "role"), [(True, "worker"), (False, "trainer")])
def test_a_node_that_holds_no_layers_asks_for_the_place_of_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds_layers: bool, role: str
) -> None:
    asked = list[bytes]()

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request.read())
        return httpx.Response(403, json={"code": "revoked", "detail": "No.", "action": "Ask."})

    transport = httpx.MockTransport(refuse)
    monkeypatch.setattr(admission_keeper, "http_client", lambda _url: httpx.AsyncClient(transport=transport))

    async def scenario(world: Organised) -> None:
        (node,) = await world.started(1, admitted=False)
        settings = node.settings.model_copy(update={"organiser": "http://organiser"})
        keeper = keeper_of(settings, node.identity, lambda: OFFER, now, holds_layers=holds_layers)
        assert keeper is not None
        with pytest.raises(NeuroShardError, match="No"):
            await keeper.admit(lambda _: None)

    play(tmp_path, scenario)
    assert read_claim(asked[0], JoinClaim, MAX_JOIN_BYTES).payload.role == role


def test_the_organiser_admits_refreshes_and_gives_a_free_place_to_the_next(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        organiser = Organiser(wanted=1)
        nodes = await world.started(0, 1, 2, admitted=False)
        keepers = [keeper_at(node, organiser) for node in nodes[1:]]
        first = anyio.CancelScope()

        async def keep_first() -> None:
            with first:
                await keepers[0].run(members_at(nodes[1]))

        world.tasks.start_soon(keep_first)
        await anyio.sleep(1)
        world.tasks.start_soon(keepers[1].run, members_at(nodes[2]))
        await until(700, lambda: peers_of(nodes[0]) == ids(1))
        await anyio.sleep(1)
        assert "number 1 in the queue" in keepers[1].trouble
        await anyio.sleep(1.1 * ADMISSION_SECONDS)
        assert peers_of(nodes[0]) == ids(1)  # refreshed
        first.cancel()
        await anyio.sleep(1.1 * ADMISSION_SECONDS)
        assert peers_of(nodes[0]) == ids(2)
        assert keepers[1].trouble == ""
        organiser.database.close()

    play(tmp_path, scenario)


def test_a_dead_organiser_is_reported_and_found_again(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        organiser = Organiser()
        nodes = await world.started(0, 1, 2, admitted=False)
        keepers = [keeper_at(node, organiser) for node in nodes[1:]]
        for keeper, node in zip(keepers, nodes[1:], strict=True):
            world.tasks.start_soon(keeper.run, members_at(node))
        await until(700, lambda: all(len(peers_of(node)) == 2 for node in nodes))
        organiser.is_dead = True
        await anyio.sleep(1.2 * ADMISSION_SECONDS)
        assert all(len(peers_of(node)) == 2 for node in nodes)
        assert all("does not answer: refused" in keeper.trouble for keeper in keepers)
        organiser.is_dead = False
        await until(700, lambda: all(keeper.trouble == "" for keeper in keepers))
        assert all(len(peers_of(node)) == 2 for node in nodes)
        organiser.database.close()

    play(tmp_path, scenario)


def test_a_node_that_ends_leaves_the_queue_and_comes_back_to_its_place(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        organiser = Organiser(wanted=1)
        nodes = await world.started(1, 2, admitted=False)
        keepers, scopes = [keeper_at(node, organiser) for node in nodes], [anyio.CancelScope() for _ in nodes]

        async def keep(index: int) -> None:
            with scopes[index]:
                await keepers[index].run(members_at(nodes[index]))

        world.tasks.start_soon(keep, 0)
        await anyio.sleep(1)
        world.tasks.start_soon(keep, 1)
        await anyio.sleep(1)
        assert organiser.database.waiting() == 1
        for scope in scopes:
            scope.cancel()
        await anyio.sleep(1)
        me = nodes[0].identity.node_id
        assert (organiser.database.waiting(), organiser.database.has_departed(me)) == (0, True)
        again = keeper_at(nodes[0], organiser)
        assert again.restore(OFFER, nodes[0].identity)
        world.tasks.start_soon(again.run, members_at(nodes[0]))
        await anyio.sleep(0.6 * ADMISSION_SECONDS)
        assert not organiser.database.has_departed(me)
        organiser.database.close()

    play(tmp_path, scenario)


def test_a_full_disk_of_the_node_does_not_end_its_renewals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: Organised) -> None:
        organiser = Organiser()
        (node,) = await world.started(1, admitted=False)
        keeper = keeper_at(node, organiser)

        def full(*_: object) -> None:
            raise StorageError("The disk is full.", "Free some space.")

        with monkeypatch.context() as patched:
            patched.setattr(StateFile, "write", full)
            world.tasks.start_soon(keeper.run, members_at(node))
            await anyio.sleep(3.1 * ADMISSION_SECONDS)
            place = organiser.database.place_of(node.identity.node_id)
            assert place is not None
            assert place.expires_at > now()
            assert members_at(node).own_admission == place.admission
            assert "The disk is full" in keeper.trouble
        await anyio.sleep(ADMISSION_SECONDS)
        assert keeper.trouble == ""
        organiser.database.close()

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("answer", "most"),
    [
        (httpx.Response(404, json={"code": "no_place", "detail": "No place.", "action": "Join again."}), 8),
        (httpx.Response(503, headers={"retry-after": "0"}), 700),
    ],
)
def test_no_answer_makes_a_node_ask_without_pause(tmp_path: Path, answer: httpx.Response, most: int) -> None:
    async def scenario(world: Organised) -> None:
        (node,) = await world.started(1, admitted=False)
        asked = list[str]()

        def respond(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.path)
            assert len(asked) <= 1000
            return answer

        keeper = keeper_at(node, httpx.MockTransport(respond))
        with anyio.move_on_after(1800):
            await keeper.run(members_at(node))
        assert 2 <= len(asked) <= most

    play(tmp_path, scenario)


def test_the_reason_of_a_full_queue_reaches_the_owner(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        (node,) = await world.started(1, admitted=False)
        full = httpx.Response(503, json={"code": "queue_full", "detail": "The queue is full.", "action": "Wait."})
        keeper = keeper_at(node, httpx.MockTransport(lambda _: full))
        with pytest.raises(NeuroShardError, match=r"it is busy \(status 503: The queue is full\)"):
            await keeper.admit(lambda _: None)

    play(tmp_path, scenario)


ADMITTED = {"status": "admitted", "admission": "AAAA"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.Response(200, json=ADMITTED), "cannot be read"),
        (
            httpx.Response(200, json={**ADMITTED, "admission": b64encode(admission_of(2, START)).decode()}),
            "another node",
        ),
        (httpx.Response(200, json={**ADMITTED, "admission": "not base64"}), "is not that of this run"),
        (httpx.Response(200, content=b"<html>"), "is not that of this run"),
        (httpx.Response(302, headers={"location": "https://elsewhere"}), "is not that of this run"),
        (httpx.Response(200, content=bytes(10**5)), "its answer is too long"),
        (
            httpx.Response(403, json={"code": "revoked", "detail": "You may not.", "action": "Ask."}),
            "You may not. Ask.",
        ),
        (httpx.Response(503, headers={"retry-after": "2"}), "it is busy"),
    ],
)
def test_an_answer_that_is_no_admission_of_this_node_admits_nothing(
    tmp_path: Path, answer: httpx.Response, reason: str
) -> None:
    async def scenario(world: Organised) -> None:
        (node,) = await world.started(1, admitted=False)
        keeper = keeper_at(node, httpx.MockTransport(lambda _: answer))
        with pytest.raises(NeuroShardError, match=reason):
            await keeper.admit(lambda _: None)
        assert not keeper.restore(OFFER, node.identity)

    play(tmp_path, scenario)


def test_a_stored_admission_serves_a_restart(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        organiser = Organiser()
        (node,) = await world.started(1, admitted=False)
        await keeper_at(node, organiser).admit(lambda _: None)
        organiser.is_dead = True
        again, other = keeper_at(node, organiser), world.node(2)
        assert again.restore(OFFER, node.identity)
        assert not again.restore(OFFER, other.identity)
        await anyio.sleep(ADMISSION_SECONDS + 1)
        assert not again.restore(OFFER, node.identity)
        organiser.database.close()

    play(tmp_path, scenario)
