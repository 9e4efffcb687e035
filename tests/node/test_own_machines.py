"""Machines of one wallet in a run of friends: they find each other, pause together, and obey nobody else.

Real: the messages, the signatures, the membership and the file. Simulated: the network, the clock and the training.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
import trio
from trio.testing import MockClock

from benchmarks.friends import befriend
from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.config.settings import Settings
from neuroshard.consensus.message_queue import PART
from neuroshard.consensus.stage_chain import CHAIN
from neuroshard.errors import UsageError
from neuroshard.host.identity import StoredRevocations
from neuroshard.identity import Delegation, NodeIdentity, NodeKey, Signed, SignedRunParameters, TokenSecret, Wallet
from neuroshard.identity.claims import DelegationGrant
from neuroshard.membership.handshake import GREET_AGAIN_SECONDS
from neuroshard.membership.machine_orders import (
    ANSWER_LIMITS,
    MACHINE_KIND,
    MachineAnswer,
    MachineOrder,
    MachineRequest,
    OrderMark,
    WalletOrders,
)
from neuroshard.membership.run_members import MAX_NODES
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import Connection, InMemoryNetwork, Network, PeerRefusedError
from neuroshard.network.in_memory_links import Link
from neuroshard.network.transfer_policy import PolicyTransport, TransferPolicy
from neuroshard.node.own_machines import LOOK_SECONDS, MACHINES_FILE, STRANGER_SECONDS, OwnMachines
from neuroshard.node.peer_network import PAPERS_SECONDS, PeerNetwork
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.offer import RunOffer
from neuroshard.state.replica_status import REPLICA_STATUS
from neuroshard.status.board import (
    Command,
    CommandChannel,
    CommandResult,
    ListMachines,
    OrderMachines,
    Pause,
    StatusBoard,
)
from neuroshard.status.machines import MachineList
from neuroshard.status.snapshot import ModelStatus, NodeState, NodeStatus, TrainingStatus
from neuroshard.types import Architecture, LayerRange, NodeId
from neuroshard.waiting import Signal
from tests.worlds.clock import at_once

START = 1_800_000_000.0
YEAR = 3.2e7
WALLETS = {
    name: Wallet.from_secret(TokenSecret("hex", bytes([at] * 32)))
    for at, name in enumerate(("ada", "bo", "eve", "bo-in-the-open"))
}
ADA = WALLETS["ada"]
SHAPE = Architecture(64, 2, 2, 1, 128, 512, 32)
PARAMETERS = RunParameters("test", 1, SHAPE, 1, 4, 8, 7, GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 512))
OFFER = RunOffer.of_new_run(SignedRunParameters.sign(ADA, PARAMETERS))
LAYERS = LayerRange(0, 2)
PAUSE_ALL, RESUME_ALL = OrderMachines("pause"), OrderMachines("resume")
TRAINING, PAUSED = NodeState.TRAINING, NodeState.PAUSED

pytestmark = pytest.mark.usefixtures("inline_threads")


def now() -> float:
    return START + anyio.current_time()


def identity_of(number: int, owner: str) -> NodeIdentity:
    key, wallet = NodeKey.from_seed((number + 1).to_bytes(32, "little")), WALLETS[owner]
    delegation = Delegation.issue(wallet, key.public_key, START + YEAR)
    return NodeIdentity(wallet.wallet_id, key.node_id, key, delegation)


@dataclass(eq=False)
class Node:
    """One machine. `taken` are the commands that its trainer got."""

    name: str
    identity: NodeIdentity
    peer_network: PeerNetwork
    commands: CommandChannel
    board: StatusBoard
    own: OwnMachines
    taken: list[Command] = field(default_factory=list[Command])
    step_seconds: float = 0.1  # until a pause begins
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    _arrived: Signal = field(default_factory=Signal)

    @property
    def state(self) -> NodeState:
        return self.board.current().state

    async def live(self) -> None:
        with self.scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.peer_network.networking.run)
                self.commands.listen(self._arrived.notify)
                while True:
                    await self._arrived.wait()
                    while (taken := self.commands.take()) is not None:
                        tasks.start_soon(self._obey, *taken)
        self.ended.set()

    async def _obey(self, command: Command, answer: Any) -> None:
        self.taken.append(command)
        await anyio.sleep(self.step_seconds)
        state = PAUSED if isinstance(command, Pause) else TRAINING
        self.board.publish(replace(self.board.current(), state=state, state_reason="As asked."))
        answer.set_result(CommandResult(state, "Done."))

    async def list(self) -> MachineList:
        return await self.own.carry_out(ListMachines())

    async def listed(self) -> dict[str, bool]:
        """The names in this node's list, and whether they can be reached."""
        machines = (await self.list()).machines
        return {one.status.name if one.status else "": one.is_reachable for one in machines}


class LocalTransport(PolicyTransport):
    """Its peers have addresses of the local network; notes which of them are asked for their status."""

    def __init__(self, inner: Any, asked: list[NodeId]) -> None:
        super().__init__(inner, TransferPolicy())
        self._asked = asked

    def connections(self) -> tuple[Connection, ...]:
        found = super().connections()
        return tuple(replace(one, address=f"/ip4/127.0.0.1/tcp/4001/p2p/{one.peer}") for one in found)

    async def request(self, peer: NodeId, frame: Frame, **options: Any) -> Frame:
        if frame.kind == MACHINE_KIND:
            self._asked.append(peer)
        return await super().request(peer, frame, **options)


@dataclass
class World:
    folder: Path
    network: InMemoryNetwork
    tasks: Any
    offer: RunOffer = OFFER
    asked: list[NodeId] = field(default_factory=list[NodeId])  # by nodes that see all others on their local network

    def start(self, number: int, name: str, owner: str = "ada", *, in_run: bool = True, is_near: bool = False) -> Node:
        """Start a node, or start it again on its disk. One that `is_near` sees all others on its local network."""
        me = identity_of(number, owner)

        @asynccontextmanager
        async def opened() -> AsyncGenerator[Network]:
            self.network.join(me.node_id)
            try:
                found = self.network.network_of(me.node_id)
                yield replace(found, transport=LocalTransport(found.transport, self.asked)) if is_near else found
            finally:
                self.network.kill(me.node_id)

        settings = Settings(data_dir=self.folder / f"node-{number}", p2p_host="127.0.0.1", genesis="./data")
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        if owner == "bo":  # a friend in the same run; Eve is a stranger
            befriend(settings.data_dir, OFFER, me.delegation.grant.wallet_public_key, ADA)
        training = TrainingStatus(steps=10, tokens=1000, tokens_per_second=100.0)
        model = ModelStatus(SHAPE, 1000, LAYERS, LAYERS.roles(2))
        board = StatusBoard(NodeStatus("1.2.3", START, START, TRAINING, "Training.", model=model, training=training))
        peer_network, commands = PeerNetwork.of(settings, me, opened, now, offload=at_once), CommandChannel()
        if in_run:
            peer_network.join(self.offer, board.current, is_shared=True)
        own = OwnMachines(WALLETS[owner], peer_network, commands, board, name=name, now=now)
        peer_network.networking.attach(own.live)
        node = Node(name, me, peer_network, commands, board, own)
        self.tasks.start_soon(node.live)
        return node

    async def stop(self, node: Node) -> None:
        node.scope.cancel()
        await node.ended.wait()

    async def send(self, sender: Node, receiver: Node, request: MachineRequest) -> MachineAnswer:
        """Send a request as the sender's node: the network proves that it is this node."""
        transport = self.network.network_of(sender.identity.node_id).transport
        frame = Frame(MACHINE_KIND, request)
        reply = await transport.request(receiver.identity.node_id, frame, reply=ANSWER_LIMITS, timeout_seconds=30)
        return reply.read(MachineAnswer)


def play(folder: Path, scenario: Callable[[World], Awaitable[None]], seed: int = 0) -> None:
    async def main() -> None:
        chance = Random(seed)
        link = Link(delay_seconds=0.05)
        with InMemoryNetwork(chance, default_link=link, now=now) as network, anyio.fail_after(3000):
            async with anyio.create_task_group() as tasks:
                await scenario(World(folder, network, tasks))
                tasks.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(200):
        while not await holds():
            await anyio.sleep(1)


async def knowing(*nodes: Node) -> None:
    """Wait until the machines have found each other."""
    names = {node.name: True for node in nodes}
    for node in nodes:

        async def is_known(node: Node = node) -> bool:
            return await node.listed() == names

        await until(is_known)


def signed_by(node: Node, kind: Any, receiver: Node, number: int, owner: str = "ada") -> MachineRequest:
    orders = WalletOrders(WALLETS[owner], node.identity, OrderMark(0, ""))
    return orders.request(kind, receiver.identity.node_id, number, now())


def test_machines_of_one_wallet_find_each_other_and_pause_and_resume_together(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        laptop, tower, attic = (world.start(at, name) for at, name in enumerate(("laptop", "tower", "attic")))
        friend = world.start(5, "bo's", owner="bo")
        await knowing(laptop, tower, attic)
        assert await friend.listed() == {"bo's": True}
        told = await laptop.own.carry_out(PAUSE_ALL)
        assert told.message == "3 of 3 machines paused."
        assert [one.is_here for one in told.machines] == [True, False, False]
        assert [one.has_obeyed for one in told.machines] == [True] * 3
        assert [one.status.state for one in told.machines if one.status] == [PAUSED] * 3
        assert [node.state for node in (laptop, tower, attic, friend)] == [PAUSED, PAUSED, PAUSED, TRAINING]
        assert (await attic.own.carry_out(RESUME_ALL)).message == "3 of 3 machines resumed."
        assert [node.state for node in (laptop, tower, attic)] == [TRAINING] * 3
        one = await tower.own.carry_out(OrderMachines("pause", attic.identity.node_id))
        assert one.message == "1 of 1 machine paused."
        assert [node.state for node in (laptop, tower, attic)] == [TRAINING, TRAINING, PAUSED]
        with pytest.raises(UsageError, match="No machine of your wallet"):
            await tower.own.carry_out(OrderMachines("pause", friend.identity.node_id))
        assert friend.taken == []

    play(tmp_path, scenario)


def test_another_wallet_commands_nothing_whatever_it_sends(tmp_path: Path) -> None:
    """A member of the run and a stranger send their own orders, copied ones, and orders with forged delegations."""

    async def scenario(world: World) -> None:
        laptop, tower = world.start(0, "laptop"), world.start(1, "tower")
        friend, eve = world.start(5, "bo's", owner="bo"), world.start(9, "eve's", owner="eve")
        await knowing(laptop, tower)
        copied = signed_by(laptop, "pause", tower, 2**50)
        for attacker, owner in ((friend, "bo"), (eve, "eve")):
            key, wallet = attacker.identity.key.public_key, ADA.public_key
            grant = DelegationGrant(key, wallet, int(START + YEAR))
            forged = replace_body(attacker.identity.delegation.signed, grant)
            own = signed_by(attacker, "pause", tower, 2**50, owner)
            for request in (
                own,
                copied,
                MachineRequest(own.delegation, copied.order),
                MachineRequest(forged, copied.order),
                MachineRequest(forged, own.order),
                signed_by(attacker, "status", tower, 0, owner),
            ):
                with pytest.raises(PeerRefusedError):
                    await world.send(attacker, tower, request)
        assert (tower.taken, tower.state) == ([], TRAINING)
        assert await tower.listed() == {"laptop": True, "tower": True}

    play(tmp_path, scenario)


def replace_body(signed: Signed[DelegationGrant], grant: DelegationGrant) -> Signed[DelegationGrant]:
    import msgspec

    return Signed[DelegationGrant](msgspec.msgpack.encode(grant), signed.signature)


def test_a_repeated_or_older_order_changes_nothing_also_after_a_restart(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        laptop, tower = world.start(0, "laptop"), world.start(1, "tower")
        await knowing(laptop, tower)
        number = int(now() * 1000)
        pause, older = (signed_by(laptop, "pause", tower, at) for at in (number, number - 1))
        assert (await world.send(laptop, tower, pause)).has_obeyed
        assert tower.state is PAUSED
        await tower.own.carry_out(OrderMachines("resume", tower.identity.node_id))
        for request in (pause, older):
            answer = await world.send(laptop, tower, request)
            assert not answer.has_obeyed
            assert "newer order" in answer.message
            assert answer.newest > number
        assert (len(tower.taken), tower.state) == (2, TRAINING)
        await world.stop(tower)
        again = world.start(1, "tower")
        await knowing(laptop, again)
        for request in (pause, older):
            assert not (await world.send(laptop, again, request)).has_obeyed
        assert (again.taken, again.state) == ([], TRAINING)
        await world.stop(again)
        (tmp_path / "node-1" / MACHINES_FILE).write_text("{")
        damaged = world.start(1, "tower")
        await knowing(laptop, damaged)
        assert not (await world.send(laptop, damaged, pause)).has_obeyed  # made before this start
        assert (await laptop.own.carry_out(PAUSE_ALL)).message == "2 of 2 machines paused."

    play(tmp_path, scenario)


@pytest.mark.parametrize("seed", range(4))
def test_two_machines_that_command_at_once_leave_all_in_one_state(tmp_path: Path, seed: int) -> None:
    async def scenario(world: World) -> None:
        nodes = [world.start(at, f"machine {at}") for at in range(4)]
        await knowing(*nodes)
        chance = Random(seed)
        for one in nodes:
            one.step_seconds = chance.uniform(0, 8)
            for other in nodes:
                ids = one.identity.node_id, other.identity.node_id
                world.network.set_link(*ids, Link(delay_seconds=chance.uniform(0, 0.5)))
        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(nodes[0].own.carry_out, PAUSE_ALL)
                tasks.start_soon(nodes[1].own.carry_out, RESUME_ALL)
                tasks.start_soon(nodes[2].own.carry_out, chance.choice((PAUSE_ALL, RESUME_ALL)))
            await anyio.sleep(30)
            assert len({node.state for node in nodes}) == 1

    play(tmp_path, scenario, seed)


def test_a_machine_in_another_run_is_found_on_the_local_network_and_a_neighbour_is_asked_seldom(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        laptop, friend = world.start(0, "laptop", is_near=True), world.start(5, "bo's", owner="bo", in_run=False)
        tower = world.start(1, "tower", in_run=False)
        await knowing(laptop, tower)  # the tower learns of the laptop by its question
        for node in (friend, tower):
            world.asked.clear()
            await anyio.sleep(4 * STRANGER_SECONDS)
            often = node is tower
            assert (world.asked.count(node.identity.node_id) > 4) == often
        assert (await tower.own.carry_out(PAUSE_ALL)).message == "2 of 2 machines paused."
        assert friend.taken == []

    play(tmp_path, scenario)


def test_a_machine_that_is_away_is_listed_with_its_last_status_and_not_paused_when_it_is_back(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        laptop, tower = world.start(0, "laptop"), world.start(1, "tower")
        await knowing(laptop, tower)
        world.network.partition([tower.identity.node_id], [laptop.identity.node_id])
        left = now()
        await anyio.sleep(200)
        began = anyio.current_time()
        away = (await laptop.list()).machines[1]
        assert anyio.current_time() - began < 1  # a list does not wait again for a machine that was silent
        assert (away.is_reachable, away.status and away.status.state) == (False, TRAINING)
        assert away.seen_at is not None
        assert left - LOOK_SECONDS - 1 <= away.seen_at <= left
        told = await laptop.own.carry_out(PAUSE_ALL)
        assert told.message == "1 of 2 machines paused."
        assert told.machines[1].has_obeyed is False
        assert "did not answer" in told.machines[1].message
        await world.stop(laptop)
        laptop = world.start(0, "laptop")  # it still knows the tower
        await anyio.sleep(10)
        assert await laptop.listed() == {"laptop": True, "tower": False}
        world.network.partition()
        await knowing(laptop, tower)
        await anyio.sleep(100)
        assert (tower.taken, tower.state) == ([], TRAINING)
        assert (await laptop.own.carry_out(PAUSE_ALL)).message == "2 of 2 machines paused."

    play(tmp_path, scenario)


def test_a_long_step_is_answered_before_it_ends(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        laptop, tower = world.start(0, "laptop"), world.start(1, "tower")
        await knowing(laptop, tower)
        tower.step_seconds = 60.0
        told = await laptop.own.carry_out(PAUSE_ALL)
        assert told.machines[1].has_obeyed is True
        assert told.machines[1].message == "It is paused as soon as its present step ends."
        await anyio.sleep(60)
        assert tower.state is PAUSED

    play(tmp_path, scenario)


def test_malformed_and_oversized_messages_and_a_flood_do_not_keep_a_machine_from_its_owner(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        laptop, tower = world.start(0, "laptop"), world.start(1, "tower")
        eve = world.start(9, "eve's", owner="eve")
        await knowing(laptop, tower)
        transport = world.network.network_of(eve.identity.node_id).transport
        huge = MachineRequest(eve.identity.delegation.signed, Signed[MachineOrder](bytes(50_000), bytes(64)))
        frames = [
            Frame(MACHINE_KIND),
            Frame(MACHINE_KIND, {"delegation": "x", "order": [1, 2, 3]}),
            Frame(MACHINE_KIND, huge),
            Frame(MACHINE_KIND, MachineRequest(Signed[DelegationGrant](b"\xff", bytes(64)), huge.order)),
            Frame(MACHINE_KIND, signed_by(eve, "pause", tower, 2**50, "eve")),
        ]
        refused = 0

        async def flood(frame: Frame) -> None:
            nonlocal refused
            for _ in range(50):
                with pytest.raises(PeerRefusedError):
                    await transport.request(tower.identity.node_id, frame, reply=ANSWER_LIMITS, timeout_seconds=60)
                refused += 1

        async with anyio.create_task_group() as tasks:
            for frame in frames * 10:
                tasks.start_soon(flood, frame)
            await anyio.sleep(1)
            assert (await laptop.own.carry_out(PAUSE_ALL)).message == "2 of 2 machines paused."
        assert refused == 50 * 10 * len(frames)
        assert (len(tower.taken), tower.state) == (1, PAUSED)

    play(tmp_path, scenario)


def test_a_disk_that_refuses_keeps_the_order_from_taking_effect(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        laptop, tower = world.start(0, "laptop"), world.start(1, "tower")
        await knowing(laptop, tower)
        file = tmp_path / "node-1" / MACHINES_FILE
        file.unlink(missing_ok=True)
        file.mkdir()
        told = await laptop.own.carry_out(PAUSE_ALL)
        assert told.message == "1 of 2 machines paused."
        assert "cannot be stored" in told.machines[1].message
        assert tower.taken == []
        file.rmdir()
        assert (await laptop.own.carry_out(PAUSE_ALL)).message == "2 of 2 machines paused."

    play(tmp_path, scenario)


def refuses(node: Node, other: Node) -> bool:
    """Whether a node serves another one nothing, because its wallet has revoked it."""
    members = node.peer_network.joined.members if node.peer_network.joined else None
    assert members is not None
    return f"has revoked node {other.identity.node_id}" in members.refusal(other.identity.node_id)


def test_a_stolen_node_that_its_wallet_revoked_is_refused_by_all_for_ever(tmp_path: Path) -> None:
    """By the friends at once, by those that come later, after restarts, and while the wallet's nodes are away."""

    async def scenario(world: World) -> None:
        laptop, stolen = world.start(0, "laptop"), world.start(1, "stolen")
        friend = world.start(5, "bo's", owner="bo")
        await knowing(laptop, stolen)
        node = stolen.identity.node_id

        async def in_view(of: Node) -> bool:
            return of.peer_network.joined is not None and node in {one.node_id for one in of.peer_network.look().peers}

        await until(lambda: in_view(friend))
        assert StoredRevocations(tmp_path / "node-0").revoke(ADA, node)
        assert not StoredRevocations(tmp_path / "node-0").revoke(ADA, node)
        with anyio.fail_after(PAPERS_SECONDS + 5):
            while not (refuses(laptop, stolen) and refuses(friend, stolen)):
                await anyio.sleep(0.5)
        await anyio.sleep(1)
        assert not await in_view(friend)
        assert not await in_view(laptop)
        with pytest.raises(PeerRefusedError, match="has revoked node"):
            await world.send(stolen, laptop, signed_by(stolen, "pause", laptop, 2**50))
        transport = world.network.network_of(node).transport
        answering = friend.peer_network.networking.current
        assert answering is not None
        for kind in (CHAIN, PART, REPLICA_STATUS):  # a vote and a contribution are parts of a round's messages
            answering.transport.serve(kind, never, FrameLimits())
            with pytest.raises(PeerRefusedError, match="has revoked node"):
                await transport.request(friend.identity.node_id, Frame(kind), timeout_seconds=30)
        told = await laptop.own.carry_out(PAUSE_ALL)
        assert told.message == "1 of 1 machine paused."
        assert [one.message for one in (await laptop.list()).machines] == ["", "Your wallet has revoked it."]
        with pytest.raises(UsageError, match="No machine of your wallet"):
            await laptop.own.carry_out(OrderMachines("pause", node))

        await anyio.sleep(PAPERS_SECONDS + 1)
        await world.stop(laptop)
        await world.stop(friend)
        again = world.start(5, "bo's", owner="bo")
        late = world.start(6, "bo's other", owner="bo")
        for each in (again, late):
            with anyio.fail_after(60):
                while not refuses(each, stolen):
                    await anyio.sleep(0.5)
        await anyio.sleep(120)
        assert refuses(again, stolen)
        assert not await in_view(again)
        assert not await in_view(late)
        found = world.start(2, "found")  # the same computer with a new key
        await until(lambda: reachable(again, found))
        assert refuses(again, stolen)

    play(tmp_path, scenario)


def test_in_an_open_run_all_nodes_refuse_a_stolen_node_of_a_wallet_that_counts(tmp_path: Path) -> None:
    """The names of strangers are free: what they revoke is not kept, until the owner has named the wallet."""

    async def scenario(world: World) -> None:
        world.offer = RunOffer.of_new_run(SignedRunParameters.sign(ADA, replace(PARAMETERS, admission="strangers")))
        laptop, stolen = world.start(0, "laptop"), world.start(1, "stolen")
        eve, bo = world.start(9, "eve's", owner="eve"), world.start(5, "bo's", owner="bo-in-the-open")
        bos = identity_of(6, "bo-in-the-open").node_id
        nodes = [laptop, eve, bo]
        for each in nodes:
            await until(lambda each=each: reachable(each, stolen))
        assert StoredRevocations(tmp_path / "node-0").revoke(ADA, stolen.identity.node_id)
        assert StoredRevocations(tmp_path / "node-9").revoke(WALLETS["eve"], laptop.identity.node_id)
        assert StoredRevocations(tmp_path / "node-5").revoke(WALLETS["bo-in-the-open"], bos)
        with anyio.fail_after(PAPERS_SECONDS + 10):
            while not all(refuses(each, stolen) for each in nodes):
                await anyio.sleep(0.5)
        await anyio.sleep(1)
        for each in nodes:
            assert not await reachable(each, stolen)
            assert not refuses(each, laptop)
        assert laptop.peer_network.revoked_nodes.nodes_of(WALLETS["eve"].wallet_id) == ()
        bo_wallet = WALLETS["bo-in-the-open"].wallet_id
        assert laptop.peer_network.revoked_nodes.nodes_of(bo_wallet) == ()
        StoredFoundations(tmp_path / "node-0").name_voter(world.offer, ADA, bo_wallet)
        for each in nodes:
            followed = each.peer_network.exchange.followed
            assert followed is not None
            followed.learn_foundations(StoredFoundations(tmp_path / "node-0").read(world.offer))
        await anyio.sleep(GREET_AGAIN_SECONDS + 10)
        assert laptop.peer_network.revoked_nodes.nodes_of(bo_wallet) == (bos,)
        await world.stop(laptop)
        await world.stop(bo)
        again, late = world.start(5, "bo's", owner="bo-in-the-open"), world.start(7, "late", owner="eve")
        await anyio.sleep(60)
        for each in (again, late):
            assert refuses(each, stolen)
            assert not await reachable(each, stolen)
        joined = again.peer_network.joined
        assert joined is not None
        members = joined.members
        assert members is not None
        for number in range(MAX_NODES):  # a flood of free names makes it forget what the stolen node has said
            members.introduce(NodeId(f"name {number}"), WALLETS["eve"].wallet_id, START + YEAR)
        assert members.refusal(stolen.identity.node_id)

    play(tmp_path, scenario)


async def reachable(node: Node, other: Node) -> bool:
    return other.identity.node_id in {one.node_id for one in node.peer_network.look().peers}


async def never(_sender: NodeId, _frame: Frame) -> Frame:
    raise AssertionError("the gate has let a revoked node in")


def test_without_a_network_the_list_has_this_machine_only(tmp_path: Path) -> None:
    async def main() -> None:
        settings = Settings(data_dir=tmp_path, network=False)
        board, commands = StatusBoard(NodeStatus("1", START, START, TRAINING)), CommandChannel()
        peer_network = PeerNetwork.of(settings, identity_of(0, "ada"), None, now, offload=at_once)
        own = OwnMachines(ADA, peer_network, commands, board, name="laptop", now=now)
        node = Node("laptop", identity_of(0, "ada"), peer_network, commands, board, own)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.live)
            assert await node.listed() == {"laptop": True}
            assert (await own.carry_out(PAUSE_ALL)).message == "1 of 1 machine paused."
            tasks.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
