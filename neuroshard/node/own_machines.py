"""The other machines of this node's wallet: finds them, asks for their status, and pauses and resumes them together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import Annotated

import anyio
import anyio.to_thread
from msgspec import Meta, Struct

from neuroshard.config.state_file import StateFile
from neuroshard.errors import NeuroShardError, StorageError, UsageError
from neuroshard.identity import Wallet
from neuroshard.membership.connectivity import DialledRequests
from neuroshard.membership.machine_orders import (
    ANSWER_LIMITS,
    MACHINE_KIND,
    MAX_ORDER_NUMBER,
    REQUEST_LIMITS,
    MachineAnswer,
    MachineRequest,
    NamedNode,
    OrderKind,
    OrderMark,
    WalletOrders,
)
from neuroshard.membership.swarm_view import Member
from neuroshard.messages import Frame
from neuroshard.network import Network, PeerUnreachableError, RequestRefusedError
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.runs.knocking import near_host
from neuroshard.status.board import (
    CommandChannel,
    CommandResult,
    ListMachines,
    MachineCommand,
    OrderMachines,
    Pause,
    Resume,
    StatusBoard,
)
from neuroshard.status.machines import (
    MAX_SENTENCE_CHARACTERS,
    Machine,
    MachineAction,
    MachineList,
    MachineStatus,
    machine_status,
    printable,
)
from neuroshard.status.snapshot import NodeState
from neuroshard.types import DAY_SECONDS, NodeId, UnixSeconds
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)

MACHINES_FILE = "network/machines.json"
MAX_MACHINES = 1000
MAX_FILE_BYTES = 4_000_000  # MAX_MACHINES reports in their longest form fit
LOOK_SECONDS = 30.0
ASK_SECONDS = 5.0  # for a status, the dialling included
OBEY_SECONDS = 10.0  # after this time a machine answers although its present step has not ended yet
SEND_SECONDS = 25.0  # for an order that waits for an earlier one to be carried out
ASKED_AT_ONCE = 32
STRANGER_SECONDS = 120.0  # until a neighbour that refused is asked again: it may have been starting
KEPT_SECONDS = 30 * DAY_SECONDS  # a machine that was silent for this time is no longer listed
REVOKED = "Your wallet has revoked it."
DONE = {"pause": "paused", "resume": "resumed"}


class StoredMachine(Struct, frozen=True):
    """The last report of a machine."""

    node_id: NamedNode
    seen_at: UnixSeconds
    status: MachineStatus


class StoredMachines(Struct, frozen=True):
    """The newest order that this node has accepted, and the machines that it knows."""

    number: Annotated[int, Meta(ge=0, le=MAX_ORDER_NUMBER)]
    sender: NamedNode
    machines: Annotated[tuple[StoredMachine, ...], Meta(max_length=MAX_MACHINES)] = ()


def machines_file(data_dir: Path) -> StateFile[StoredMachines]:
    """The list of a data folder."""
    return StateFile(
        data_dir / MACHINES_FILE,
        StoredMachines,
        "set_aside",
        "your other machines are listed again when they answer",
        max_bytes=MAX_FILE_BYTES,
        data_dir=data_dir,
    )


def stored_machines(data_dir: Path) -> tuple[StoredMachine, ...]:
    """The machines that a node of this data folder knew last. Raises StorageError."""
    stored = machines_file(data_dir).read()
    return () if stored is None else stored.machines


@dataclass(frozen=True)
class _Outcome:
    """The result of an order here. `state` is known after a command that was carried out in time."""

    has_obeyed: bool
    message: str
    state: NodeState | None = None


class OwnMachines:
    """The machines of this node's wallet. Belongs to the event loop; the file is written in a worker thread."""

    def __init__(
        self,
        wallet: Wallet,
        peer_network: PeerNetwork,
        commands: CommandChannel,
        board: StatusBoard,
        *,
        name: str | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`name` is that of this computer, its host name by default. Orders are carried out through `commands`."""
        data_dir = peer_network.settings.data_dir
        self._peer_network = peer_network
        self._commands = commands
        self._board = board
        self._name = gethostname() if name is None else name
        self._now = now
        self._file = machines_file(data_dir)
        stored = self._stored()
        newest = OrderMark(stored.number, stored.sender)
        self._orders = WalletOrders(wallet, peer_network.identity, newest, peer_network.revoked_nodes)
        self._machines = {
            one.node_id: Machine(one.node_id, is_here=False, is_reachable=False, seen_at=one.seen_at, status=one.status)
            for one in stored.machines
        }
        self._failed_at: dict[NodeId, float] = {}  # time of the last question without an answer, by machine
        self._strangers: dict[NodeId, float] = {}  # time of the last question, by neighbour of another wallet
        self._heard = 0  # the highest number of an order that another machine has reported
        self._is_stored = True
        self._accepting = anyio.Lock()  # compares with the newest order and stores the new one
        self._obeying = anyio.Lock()  # one order is carried out at a time

    async def live(self, network: Network) -> None:
        """Answer the wallet's other machines, and look for them regularly, until cancelled."""
        network.transport.serve(MACHINE_KIND, self._answer, REQUEST_LIMITS, for_anyone=True)
        while True:
            await self._ask_all(self._known(network))
            self._forget()
            if not self._is_stored:
                await self._store_list()
            await sleep_to_tick(LOOK_SECONDS)

    async def carry_out(self, command: MachineCommand) -> MachineList:
        """List the machines, or pause or resume all of them or one. Raises UsageError."""
        network = self._peer_network.networking.current
        match command:
            case ListMachines():
                await self._ask_all(node for node in self._known(network) if self._may_answer(node))
                return MachineList(self._listed())
            case OrderMachines(action, node_id):
                return await self._order(action, node_id, network)

    async def _order(self, action: MachineAction, node_id: NodeId | None, network: Network | None) -> MachineList:
        """Ask the machines for their status, so that the number of the order is above all of theirs; then send it."""
        await self._ask_all(node for node in self._known(network) if node_id in (None, node))
        wanted = [one for one in self._listed() if node_id in (None, one.node_id) and not self._is_revoked(one.node_id)]
        if not wanted:
            raise UsageError("No machine of your wallet has this node id.", "`neuroshard machines` lists them.")
        mark = self._orders.next_mark(self._heard, self._now())
        self._heard = mark.number
        results: dict[NodeId, Machine] = {}

        async def send(machine: Machine) -> None:
            outcome = await (self._take(mark, action) if machine.is_here else self._send(mark, action, machine))
            listed = self._here() if machine.is_here else self._machines.get(machine.node_id, machine)
            status = None if listed.status is None else _after(outcome, listed.status)
            results[machine.node_id] = replace(
                listed, status=status, has_obeyed=outcome.has_obeyed, message=outcome.message
            )

        async with anyio.create_task_group() as tasks:
            for machine in wanted:
                tasks.start_soon(send, machine)
        machines = tuple(results[one.node_id] for one in wanted)
        return MachineList(machines, _summary(action, machines))

    async def _send(self, mark: OrderMark, action: MachineAction, machine: Machine) -> _Outcome:
        if not machine.is_reachable:
            return _Outcome(
                False,
                "It did not answer, so the command did not reach it. Repeat the command when the machine is back.",
            )
        try:
            answer = await self._request(machine.node_id, action, mark.number, SEND_SECONDS)
        except (NeuroShardError, TimeoutError) as error:
            self._note_silence(machine.node_id, error)
            return _Outcome(False, f"It may not have {DONE[action]}: {str(error) or 'no answer in time.'}")
        return _Outcome(answer.has_obeyed, answer.message)

    async def _answer(self, sender: NodeId, frame: Frame) -> Frame:
        order = self._orders.check(sender, frame.read(MachineRequest), self._now())
        if sender in self._machines or len(self._machines) < MAX_MACHINES:
            known = self._machines.get(sender, Machine(sender, is_here=False, is_reachable=True))
            self._machines[sender] = replace(known, is_reachable=True, message="")
        outcome = _Outcome(True, "")
        if order.kind != "status":
            _LOG.info("The machine %s of this wallet asks to %s training.", sender, order.kind)
            outcome = await self._take(OrderMark(order.number, order.sender), order.kind)
        status = _after(outcome, machine_status(self._board.current(), self._name))
        answer = MachineAnswer(
            self._peer_network.identity.delegation_at(self._now()).signed,
            status,
            self._orders.newest.number,
            outcome.has_obeyed,
            printable(outcome.message, MAX_SENTENCE_CHARACTERS),
        )
        return Frame(MACHINE_KIND, answer)

    async def _take(self, mark: OrderMark, action: MachineAction) -> _Outcome:
        """Carry out an order here, of this machine or another, if it is newer than all before."""
        async with self._accepting:
            if not self._orders.accepts(mark):
                return _Outcome(False, "It has a newer order, or this one already.")
            try:  # stored before it takes effect, so that a restart repeats no older one
                await anyio.to_thread.run_sync(self._file.write, self._record(mark))
            except StorageError as error:
                return _Outcome(False, f"The number of the order cannot be stored: {error}")
            self._orders.accept(mark)
        return await self._obey(action)

    async def _obey(self, action: MachineAction) -> _Outcome:
        """Carry out an accepted order here. The newest one comes last, because the lock keeps their order."""
        async with self._obeying:
            done = anyio.Event()
            try:
                future = self._commands.send(Pause() if action == "pause" else Resume())
                future.add_done_callback(lambda _: done.set())  # the command loop runs on this event loop
                with anyio.move_on_after(OBEY_SECONDS):
                    await done.wait()
                if not done.is_set():
                    return _Outcome(True, f"It is {DONE[action]} as soon as its present step ends.")
                result = future.result()
            except NeuroShardError as error:
                return _Outcome(False, str(error))
            assert isinstance(result, CommandResult)
            return _Outcome(True, result.message, NodeState(result.state))

    @property
    def _members(self) -> Mapping[NodeId, Member]:
        """The nodes of the run, with the wallets that their delegations name."""
        joined = self._peer_network.joined
        return {} if joined is None else joined.participant.membership.view.members

    def _known(self, network: Network | None) -> list[NodeId]:
        """The machines that were listed, nodes of the run that report this wallet, and neighbours not asked lately."""
        own, members = self._peer_network.identity, self._members
        known = dict.fromkeys(self._machines)
        known |= dict.fromkeys(node for node, member in members.items() if member.wallet_id == own.wallet_id)
        if network is not None:
            peers, now = network.transport.peers(), self._now()
            self._strangers = {
                node: at for node, at in self._strangers.items() if node in peers and now - at < STRANGER_SECONDS
            }
            unknown = sorted(peers - members.keys() - known.keys() - self._strangers.keys())
            known |= dict.fromkeys(peer for peer in unknown if near_host(network, peer))
        known.pop(own.node_id, None)
        return [node for node in known if not self._is_revoked(node)]

    def _is_revoked(self, node: NodeId) -> bool:
        return self._orders.revoked_nodes.has(node, self._peer_network.identity.wallet_id)

    def _may_answer(self, node: NodeId) -> bool:
        """Whether a list should wait for a machine: not for one that was silent and has not reported since."""
        machine, member = self._machines.get(node), self._members.get(node)
        if machine is None or machine.is_reachable:
            return True
        return member is not None and member.last_seen > self._failed_at.get(node, 0.0)

    async def _ask_all(self, nodes: Iterable[NodeId]) -> None:
        limiter = anyio.CapacityLimiter(ASKED_AT_ONCE)

        async def ask(node: NodeId) -> None:
            async with limiter:
                try:
                    await self._request(node, "status", 0, ASK_SECONDS)
                except (NeuroShardError, TimeoutError) as error:
                    self._note_silence(node, error)

        async with anyio.create_task_group() as tasks:
            for node in nodes:
                tasks.start_soon(ask, node)

    async def _request(self, node: NodeId, kind: OrderKind, number: int, seconds: float) -> MachineAnswer:
        """Send a request and note the answer of a machine of this wallet. Raises NeuroShardError or TimeoutError."""
        networking, joined = self._peer_network.networking, self._peer_network.joined
        frame = Frame(MACHINE_KIND, self._orders.request(kind, node, number, self._now()))
        with anyio.fail_after(seconds):
            if joined is not None:
                requests = DialledRequests(networking, joined.participant.membership)
                reply = await requests.request(node, frame, reply=ANSWER_LIMITS, timeout_seconds=seconds)
            elif networking.current is not None:
                transport = networking.current.transport
                reply = await transport.request(node, frame, reply=ANSWER_LIMITS, timeout_seconds=seconds)
            else:
                raise PeerUnreachableError("The network is down at present.", "This node tries again.")
        answer, now = reply.read(MachineAnswer), self._now()
        if not self._orders.is_own(node, answer, now):
            raise RequestRefusedError("It is not a machine of this wallet.")
        self._heard = max(self._heard, answer.newest)
        before = self._machines.get(node)
        if before is not None or len(self._machines) < MAX_MACHINES:
            self._is_stored &= before is not None and before.is_reachable
            self._machines[node] = Machine(node, is_here=False, is_reachable=True, seen_at=now, status=answer.status)
        return answer

    def _note_silence(self, node: NodeId, error: NeuroShardError | TimeoutError) -> None:
        """Note that a node has not answered: a machine of this wallet, or a neighbour that is none."""
        now = self._now()
        if node not in self._machines and node not in self._members:
            self._strangers[node] = now
            return
        self._failed_at[node] = now
        before = self._machines.get(node, Machine(node, is_here=False, is_reachable=False))
        self._is_stored &= not before.is_reachable
        message = printable(str(error) or "It did not answer in time.", MAX_SENTENCE_CHARACTERS)
        self._machines[node] = replace(before, is_reachable=False, message=message)

    def _forget(self) -> None:
        """Drop machines that were silent for KEPT_SECONDS, and those that have never answered and are gone."""
        oldest, members = self._now() - KEPT_SECONDS, self._members
        gone = [
            node
            for node, one in self._machines.items()
            if not one.is_reachable and node not in members and (one.seen_at is None or one.seen_at < oldest)
        ]
        for node in gone:
            del self._machines[node]
            self._failed_at.pop(node, None)

    def _here(self) -> Machine:
        status = machine_status(self._board.current(), self._name)
        own = self._peer_network.identity.node_id
        return Machine(own, is_here=True, is_reachable=True, seen_at=self._now(), status=status)

    def _listed(self) -> tuple[Machine, ...]:
        """This machine, then the others by name."""

        def place(machine: Machine) -> tuple[str, str]:
            return "" if machine.status is None else machine.status.name, machine.node_id

        shown = (
            replace(one, is_reachable=False, message=REVOKED) if self._is_revoked(one.node_id) else one
            for one in self._machines.values()
        )
        return self._here(), *sorted(shown, key=place)

    def _stored(self) -> StoredMachines:
        """The content of the file. Without one, orders that were made before now are not accepted."""
        try:
            stored = self._file.read()
        except StorageError as error:
            _LOG.warning("Your other machines are not known until they answer: %s", error)
            stored = None
        return stored or StoredMachines(int(self._now() * 1000), NodeId(""))

    def _record(self, newest: OrderMark) -> StoredMachines:
        machines = tuple(
            StoredMachine(one.node_id, one.seen_at, one.status)
            for one in self._machines.values()
            if one.seen_at is not None and one.status is not None
        )
        return StoredMachines(newest.number, NodeId(newest.sender), machines)

    async def _store_list(self) -> None:
        async with self._accepting:
            try:
                await anyio.to_thread.run_sync(self._file.write, self._record(self._orders.newest))
            except StorageError as error:
                _LOG.warning("The list of your machines cannot be stored: %s", error)
        self._is_stored = True


def _after(outcome: _Outcome, status: MachineStatus) -> MachineStatus:
    """A status with the state after a command: the next snapshot shows it within half a second."""
    if outcome.state is None or outcome.state is status.state:
        return status
    return replace(status, state=outcome.state, reason=printable(outcome.message, MAX_SENTENCE_CHARACTERS))


def _summary(action: MachineAction, machines: tuple[Machine, ...]) -> str:
    """The result of an order, in a sentence."""
    count = sum(machine.has_obeyed is True for machine in machines)
    word = "machine" if len(machines) == 1 else "machines"
    return f"{count} of {len(machines)} {word} {DONE[action]}."
