"""A run of friends is closed: a stranger that knows its id and an address gets the parameters and nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from trio.testing import MockClock

from benchmarks.friends import BEFORE_EVERY_TEST, befriend, invitation_to
from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.config.settings import Settings
from neuroshard.consensus.stage_chain import CHAIN
from neuroshard.errors import UsageError
from neuroshard.exchange.data_files import DATA
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet
from neuroshard.identity.invitations import (
    Invitation,
    InvitationError,
    InvitationTerms,
    InvitedPlaces,
    invite,
)
from neuroshard.membership.announcements import Announcement, report_topic
from neuroshard.membership.claim_intake import signed_announcement
from neuroshard.membership.handshake import HANDSHAKE, HANDSHAKE_LIMITS, HandshakeMessage
from neuroshard.membership.run_members import Papers
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import InMemoryNetwork, Network, PeerRefusedError
from neuroshard.network.transfer_policy import PolicyTransport, TransferPolicy
from neuroshard.node.data_sharing import DataSharing, open_data_store
from neuroshard.node.peer_network import PAPERS_SECONDS, PeerNetwork
from neuroshard.pipeline.stage_protocol import Operation
from neuroshard.runs.exchange import RUN_KIND
from neuroshard.runs.finding import FoundRun
from neuroshard.runs.foundations import MAX_BYTES
from neuroshard.runs.knocking import KNOCK_KIND
from neuroshard.runs.offer import RunAnswer, RunOffer, RunRequest
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.state.replica_status import REPLICA_STATUS
from neuroshard.status.computer import MemoryStatus
from neuroshard.status.snapshot import ModelStatus, NodeState, NodeStatus, TrainingStatus
from neuroshard.types import Architecture, LayerRange, NodeId, RunId
from tests.worlds.claims import identity_of
from tests.worlds.clock import at_once

START = 1_800_000_000.0
OWNER = Wallet.from_secret(TokenSecret("hex", (1).to_bytes(32, "big")))  # of node 0
SHAPE = Architecture(64, 2, 2, 1, 128, 512, 32)
PARAMETERS = RunParameters("test", 1, SHAPE, 1, 4, 8, 7, GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 512))
OFFER = RunOffer.of_new_run(SignedRunParameters.sign(OWNER, PARAMETERS))
LAYERS = LayerRange(0, 2)
BO, STRANGER = 2, 9  # Bo has an invitation of its own
ASK = "Ask the owner of the run for an invitation"


class RecordingTransport(PolicyTransport):
    """Notes the kinds that are served."""

    def __init__(self, inner: Any, kinds: set[str]) -> None:
        super().__init__(inner, TransferPolicy())
        self._kinds = kinds

    def serve(self, kind: str, *arguments: Any, **options: Any) -> None:
        self._kinds.add(kind)
        super().serve(kind, *arguments, **options)


@dataclass
class Friends:
    """Nodes of one run. Node 0 is the owner's; the others need a pass."""

    folder: Path
    network: InMemoryNetwork
    kinds: set[str] = field(default_factory=set[str])
    ahead: dict[int, float] = field(default_factory=dict[int, float])  # seconds by which the clock of a node is wrong

    def node(
        self, number: int, *, has_pass: bool = True, invitation: Invitation | None = None, **settings: Any
    ) -> PeerNetwork:
        me = identity_of(number)

        @asynccontextmanager
        async def opened() -> AsyncGenerator[Network]:
            self.network.join(me.node_id)
            try:
                found = self.network.network_of(me.node_id)
                yield replace(found, transport=RecordingTransport(found.transport, self.kinds))
            finally:
                self.network.kill(me.node_id)

        chosen = Settings(data_dir=self.folder / f"node-{number}", p2p_host="127.0.0.1", genesis="./data", **settings)
        chosen.data_dir.mkdir(parents=True, exist_ok=True)
        if has_pass and number:
            label = "Bo" if number == BO else "everybody"
            befriend(chosen.data_dir, OFFER, me.delegation.grant.wallet_public_key, OWNER, label)
        made = PeerNetwork.of(
            chosen, me, opened, lambda: now() + self.ahead.get(number, 0.0), invitation=invitation, offload=at_once
        )
        made.networking.attach(DataSharing(made, open_data_store(chosen)).live)
        return made


def now() -> float:
    return START + anyio.current_time()


def status() -> NodeStatus:
    model = ModelStatus(SHAPE, 1000, LAYERS, LAYERS.roles(2))
    memory = MemoryStatus(500, 600, "--memory", 400, 300, 350)
    state, training = NodeState.TRAINING, TrainingStatus(steps=10, tokens=1000, tokens_per_second=100.0)
    return NodeStatus("1.2.3", START, START, state, "Training.", model=model, training=training, memory=memory)


def play(folder: Path, scenario: Callable[[Friends, Any], Awaitable[None]]) -> None:
    """Run a scenario with virtual time; it gets the world and a task group that ends with it."""

    async def main() -> None:
        with InMemoryNetwork() as network, anyio.fail_after(1000):
            async with anyio.create_task_group() as tasks:
                await scenario(Friends(folder, network), tasks)
                tasks.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def serving(world: Friends, tasks: Any, numbers: Collection[int], *, has_pass: bool = True) -> list[PeerNetwork]:
    nodes = [world.node(number, has_pass=has_pass) for number in numbers]
    for node in nodes:
        node.serve(OFFER, status, is_shared=True)
        tasks.start_soon(node.networking.run)
    return nodes


def peers_of(node: PeerNetwork) -> set[NodeId]:
    return {peer.node_id for peer in node.look().peers}


async def until(seconds: float, holds: Callable[[], bool]) -> None:
    with anyio.fail_after(seconds):
        while not holds():
            await anyio.sleep(0.1)


def ids(*numbers: int) -> set[NodeId]:
    return {identity_of(number).node_id for number in numbers}


def test_friends_with_a_pass_meet_and_a_stranger_stays_outside(tmp_path: Path) -> None:
    async def scenario(world: Friends, tasks: Any) -> None:
        friends = await serving(world, tasks, range(3))
        (stranger,) = await serving(world, tasks, [STRANGER], has_pass=False)
        await until(5, lambda: all(len(peers_of(friend)) == 2 for friend in friends))
        await anyio.sleep(60)
        assert [peers_of(friend) for friend in friends] == [ids(1, 2), ids(0, 2), ids(0, 1)]
        assert peers_of(stranger) <= ids(0)  # the owner announces itself, and reports nothing to it
        assert stranger.joined is not None
        assert not stranger.joined.participant.membership.view.members.keys() & ids(0, 1, 2)

    play(tmp_path, scenario)


@pytest.mark.parametrize("ahead", [-720.0, 720.0])
def test_of_two_friends_both_report_a_wrong_clock_until_it_is_set(tmp_path: Path, ahead: float) -> None:
    async def scenario(world: Friends, tasks: Any) -> None:
        world.ahead[1] = ahead
        friends = await serving(world, tasks, range(2))
        for friend in friends:
            await until(60, lambda friend=friend: "differ by 12 minutes" in (friend.clock_warning or ""))
        assert [peers_of(friend) for friend in friends] == [set(), set()]
        world.ahead[1] = 0.0
        await until(600, lambda: [peers_of(friend) for friend in friends] == [ids(1), ids(0)])
        assert [friend.clock_warning for friend in friends] == [None, None]

    play(tmp_path, scenario)


def test_a_stranger_gets_parameters_and_no_other_answer(tmp_path: Path) -> None:
    async def scenario(world: Friends, tasks: Any) -> None:
        friends = await serving(world, tasks, range(2))
        await until(5, lambda: all(len(peers_of(friend)) == 1 for friend in friends))
        assert world.kinds >= {HANDSHAKE, RUN_KIND, DATA, CHAIN, REPLICA_STATUS, *Operation}
        line = world.network.join(identity_of(STRANGER).node_id)
        for peer in sorted(ids(0, 1)):
            for kind in sorted(world.kinds - {HANDSHAKE, RUN_KIND, KNOCK_KIND}):
                with pytest.raises(PeerRefusedError, match=ASK):
                    await line.request(peer, Frame(kind), timeout_seconds=60)
            with pytest.raises(PeerRefusedError):  # it is not on the local network
                await line.request(peer, Frame(KNOCK_KIND), timeout_seconds=60)
            question = Frame(RUN_KIND, RunRequest(OFFER.run_id))
            limits = FrameLimits(max_body_bytes=MAX_BYTES, message=RunAnswer)
            answer = await line.request(peer, question, reply=limits, timeout_seconds=60)
            assert answer.read(RunAnswer) == RunAnswer(OFFER.to_json())
            hello = Frame(
                HANDSHAKE, HandshakeMessage(signed_announcement(identity_of(STRANGER), said(), now()), None, ())
            )
            with pytest.raises(PeerRefusedError, match=ASK):
                await line.request(peer, hello, reply=HANDSHAKE_LIMITS, timeout_seconds=60)
            with pytest.raises(PeerRefusedError, match=ASK):  # also after the refused handshake
                await line.request(peer, Frame(REPLICA_STATUS), timeout_seconds=60)
        heard: list[bytes] = []
        gossip = world.network.network_of(line.local_id).gossip
        gossip.subscribe(report_topic(OFFER.run_id), lambda _, data: heard.append(data) is None)
        await anyio.sleep(60)
        assert heard == []

    play(tmp_path, scenario)


def said(member_pass: bytes | None = None) -> Announcement:
    return Announcement(OFFER.run_id, 1, None, None, START, 500, False, "1", member_pass=member_pass)


def one_use(*, owner: Wallet = OWNER, run: RunId = OFFER.run_id, days: float = 1.0) -> Invitation:
    terms = InvitationTerms(START + 86_400 * days, 1, "once")
    return invite(owner, run, terms, InvitedPlaces("friends"), seed=bytes(32))


FOREIGN = Wallet.from_secret(TokenSecret("hex", bytes([77] * 32)))
MEMBER, GUEST = (identity_of(number).delegation.grant.wallet_public_key for number in (1, STRANGER))


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (invitation_to(OFFER.run_id, OWNER).pass_for(MEMBER, BEFORE_EVERY_TEST), ASK),  # the pass of another wallet
        (one_use(days=-1).pass_for(GUEST, BEFORE_EVERY_TEST), "expired"),
        (one_use(owner=FOREIGN).pass_for(GUEST, BEFORE_EVERY_TEST), "another run"),
        (one_use(run=RunId("ab" * 32)).pass_for(GUEST, BEFORE_EVERY_TEST), "another run"),
        (one_use().pass_for(GUEST, BEFORE_EVERY_TEST), "used up"),
        (invitation_to(OFFER.run_id, OWNER).pass_for(GUEST, BEFORE_EVERY_TEST), "revoked"),
        (b"no pass at all", "cannot be read"),
    ],
    ids=["stolen", "expired", "foreign owner", "foreign run", "used up", "revoked", "damaged"],
)
def test_a_pass_that_is_not_valid_opens_nothing(tmp_path: Path, shown: bytes, reason: str) -> None:
    """The only use of the invitation is taken, and the owner has revoked the one for everybody."""

    async def scenario(world: Friends, tasks: Any) -> None:
        await serving(world, tasks, [0])
        (owner,) = ids(0)
        await anyio.sleep(PAPERS_SECONDS + 1)

        async def knock(number: int, member_pass: bytes) -> None:
            line = world.network.join(identity_of(number).node_id)
            announced = signed_announcement(identity_of(number), said(member_pass), now())
            hello = Frame(HANDSHAKE, HandshakeMessage(announced, None, ()))
            await line.request(owner, hello, reply=HANDSHAKE_LIMITS, timeout_seconds=60)

        for number, invitation in ((3, one_use()), (4, invitation_to(OFFER.run_id, OWNER))):
            await knock(
                number, invitation.pass_for(identity_of(number).delegation.grant.wallet_public_key, BEFORE_EVERY_TEST)
            )
        await anyio.sleep(PAPERS_SECONDS + 1)
        StoredPasses(tmp_path / "node-0", OFFER).revoke(OWNER, "everybody")
        await anyio.sleep(PAPERS_SECONDS + 20)
        with pytest.raises(PeerRefusedError, match=reason):
            await knock(STRANGER, shown)
        with pytest.raises(PeerRefusedError, match=ASK):
            await world.network.network_of(identity_of(STRANGER).node_id).transport.request(
                owner, Frame(REPLICA_STATUS), timeout_seconds=5
            )

    play(tmp_path, scenario)


def test_a_revocation_made_on_the_owners_computer_puts_a_friend_out(tmp_path: Path) -> None:
    async def scenario(world: Friends, tasks: Any) -> None:
        friends = await serving(world, tasks, range(3))
        await until(5, lambda: all(len(peers_of(friend)) == 2 for friend in friends))
        await anyio.sleep(PAPERS_SECONDS + 1)  # the owner's node has stored the passes that it knows
        assert StoredPasses(tmp_path / "node-0", OFFER).revoke(OWNER, "everybody") == "everybody"
        await until(20, lambda: [peers_of(friends[0]), peers_of(friends[BO])] == [ids(BO), ids(0)])
        await anyio.sleep(60)
        assert [peers_of(friends[0]), peers_of(friends[BO])] == [ids(BO), ids(0)]

    play(tmp_path, scenario)


def test_an_invitation_ends_with_the_last_wallet_that_joined_with_it(tmp_path: Path) -> None:
    stored, invitation = StoredPasses(tmp_path, OFFER), invitation_to(OFFER.run_id, OWNER)
    wallets = [identity_of(number).delegation.grant.wallet_public_key for number in (1, 2)]
    stored.keep_papers(Papers(tuple(invitation.pass_for(wallet, 1) for wallet in wallets)))
    removals = [stored.remove(OWNER, identity_of(number).wallet_id[:8]) for number in (1, 2)]
    assert [is_revoked for _, is_revoked in removals] == [False, True]
    assert stored.register().passes() == ()


def test_an_invitation_shows_the_places_that_are_left_until_it_ends(tmp_path: Path) -> None:
    """Also one with which some have joined: `neuroshard run members` lists it until no place is left."""
    stored, end = StoredPasses(tmp_path, OFFER), START + 86_400
    first, second = (
        stored.issue(OWNER, InvitationTerms(end, uses, label), InvitedPlaces(""))
        for uses, label in ((3, "a"), (1, "b"))
    )
    passes = [first.pass_for(MEMBER, 1), second.pass_for(GUEST, 1)]
    stored.keep_papers(Papers(tuple(passes)))
    assert [(one.left, one.state) for one in stored.invitations(START)] == [(2, "valid"), (0, "valid")]
    assert [one.state for one in stored.invitations(end + 1)] == ["expired", "expired"]
    stored.revoke(OWNER, "a")
    assert [(one.left, one.state) for one in stored.invitations(START)] == [(3, "revoked"), (0, "valid")]


def test_the_owner_removes_one_wallet_and_the_other_friends_stay(tmp_path: Path) -> None:
    async def scenario(world: Friends, tasks: Any) -> None:
        friends = await serving(world, tasks, range(3))
        await until(5, lambda: all(len(peers_of(friend)) == 2 for friend in friends))
        await anyio.sleep(PAPERS_SECONDS + 1)
        stored, gone = StoredPasses(tmp_path / "node-0", OFFER), friends[1].identity
        with pytest.raises(UsageError, match="No member's wallet begins"):
            stored.remove(OWNER, "0" * 8)
        with pytest.raises(UsageError, match="Only the owner"):
            stored.remove(Wallet.from_secret(TokenSecret("hex", b"x" * 32)), gone.wallet_id[:8])
        assert stored.remove(OWNER, gone.wallet_id[:8])[0].wallet_id == gone.wallet_id
        await until(20, lambda: friends[1].identity.node_id not in peers_of(friends[0]))
        assert friends[2].identity.node_id in peers_of(friends[0])

    play(tmp_path, scenario)


def test_a_stranger_is_told_to_ask_for_an_invitation_and_a_friend_enters_with_one(tmp_path: Path) -> None:
    async def scenario(world: Friends, tasks: Any) -> None:
        await serving(world, tasks, [0])
        stranger = world.node(STRANGER, has_pass=False, run=OFFER.run_id)
        tasks.start_soon(stranger.networking.run)
        with pytest.raises(InvitationError, match="Ask for an invitation"):
            await stranger.finder.first(lambda _: None)
        invitation = invitation_to(OFFER.run_id, OWNER)
        invited = world.node(5, has_pass=False, invitation=invitation, run=OFFER.run_id)
        tasks.start_soon(invited.networking.run)
        found = await invited.finder.first(lambda _: None)
        assert isinstance(found, FoundRun)
        assert "was invited" in found.explanation
        own = StoredPasses(tmp_path / "node-5", OFFER).own(invited.identity.wallet_id)
        assert own is not None
        assert own.secret is None  # the invitation may not invite, so its secret is not kept
        invited.join(found.offer, status, is_shared=True)
        await until(10, lambda: peers_of(invited) == ids(0))

    play(tmp_path, scenario)
