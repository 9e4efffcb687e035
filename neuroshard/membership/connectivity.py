"""This node's connections to peers: opened, kept, dialled and reported. Training continues whatever fails here.

Known addresses come from the owner, from peers and from earlier starts; their number is bounded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import anyio
from anyio.abc import TaskGroup
from msgspec import Meta, Struct

from neuroshard.config.state_file import StateFile
from neuroshard.errors import NetworkRefusedError, NeuroShardError, StorageError
from neuroshard.membership.swarm_view import Membership
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import Network, PeerUnreachableError
from neuroshard.network.membership_gate import PeerCheck, ReaderCheck
from neuroshard.network.tasks import keep_running
from neuroshard.network.transfer_policy import PolicyTransport, TransferPolicy
from neuroshard.status.snapshot import NetworkState
from neuroshard.types import MAX_ADDRESS_CHARACTERS, NodeId
from neuroshard.waiting import Signal, sleep_to_tick

_LOG = logging.getLogger(__name__)

MAX_ADDRESSES = 256
MAX_REMEMBERED = 64
MAX_FILE_BYTES = 64 * 1024
FIRST_RETRY_SECONDS = 2.0
LONGEST_RETRY_SECONDS = 300.0
GIVEN_AGAIN_SECONDS = 600.0


@dataclass(frozen=True)
class KnownAddress:
    """A multiaddr with /p2p/<node id> at its end, and how dialling it went."""

    text: str
    is_given: bool = False  # by the owner or the run: never forgotten
    is_remembered: bool = False  # it worked in an earlier start
    is_near: bool = False  # it was found on the local network, or it is the word of the run's organiser
    failures: int = 0  # in a row
    next_try: float = 0.0  # on the monotonic clock
    worked_at: float = -inf  # on the monotonic clock: when it was dialled last with success
    met_at: float = -inf  # the same: when its node was last connected from the same host; it may have dialled this one

    @property
    def node_id(self) -> NodeId:
        """The node that the address should lead to."""
        return NodeId(self.text.rpartition("/p2p/")[2])

    @property
    def host(self) -> str:
        """IP address or name; the relay's for an address through a relay."""
        return _host_of(self.text)

    @property
    def is_trusted(self) -> bool:
        """Whether it is more than the word of a peer, which may lead to computers that only this one can reach."""
        return self.is_given or self.is_remembered or self.is_near

    @property
    def has_worked(self) -> bool:
        """Whether the address ever led to its node; otherwise it is only a peer's claim."""
        return self.is_remembered or self.worked_at > -inf


class KnownAddresses:
    """The addresses that one node knows. Times are those of one monotonic clock."""

    def __init__(self, own_id: NodeId) -> None:
        self._own_id = own_id
        self._known: dict[str, KnownAddress] = {}

    def add(
        self, addresses: Iterable[str], *, is_given: bool = False, is_remembered: bool = False, is_near: bool = False
    ) -> None:
        """Add addresses, but not malformed ones or this node's own; the number of strangers' addresses is bounded."""
        for text in addresses:
            address = KnownAddress(text, is_given, is_remembered, is_near)
            if len(text) > MAX_ADDRESS_CHARACTERS or not address.node_id or address.node_id == self._own_id:
                continue
            if text in self._known:
                known = self._known[text]
                known = replace(known, is_given=is_given or known.is_given, is_near=is_near or known.is_near)
                self._known[text] = known
            elif len(self._known) < MAX_ADDRESSES or is_given or self._forget_worst():
                self._known[text] = address

    def due(self, now: float, connected: Iterable[NodeId]) -> tuple[KnownAddress, ...]:
        """Return the addresses of unconnected nodes to dial now: given ones first, then those with fewest failures."""
        there = set(connected)
        waiting = [a for a in self._known.values() if a.next_try <= now and a.node_id not in there]
        return tuple(sorted(waiting, key=lambda address: (not address.is_given, address.failures)))

    def given_due(self, now: float, connected: Iterable[NodeId]) -> tuple[KnownAddress, ...]:
        """Return the given addresses among those due that did not work recently, for a node with enough connections.

        Through them the node finds a restarted seed again, or the other half of a swarm that was split. A pause follows
        each success, because a seed with very many connections closes idle ones.
        """
        return tuple(
            address
            for address in self.due(now, connected)
            if address.is_given and now - address.worked_at >= GIVEN_AGAIN_SECONDS
        )

    def note_success(self, text: str, now: float) -> None:
        """Record that dialling an address worked."""
        if text in self._known:
            self._known[text] = replace(self._known[text], failures=0, next_try=0.0, worked_at=now)

    def note_failure(self, text: str, now: float) -> None:
        """Record that dialling an address failed.

        The pause before the next try doubles, up to LONGEST_RETRY_SECONDS. Unless it is given, the address may now be
        forgotten when space is needed.
        """
        if text in self._known:
            known = self._known[text]
            pause = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(known.failures, 10))
            self._known[text] = replace(known, failures=known.failures + 1, next_try=now + pause)

    def try_all_again(self) -> None:
        """Make every address due now: the line is back, or the computer woke up."""
        self._known = {text: replace(known, next_try=0.0) for text, known in self._known.items()}

    def note_met(self, connected: Mapping[NodeId, str], now: float) -> None:
        """Record that these nodes are connected, and their hosts.

        Their addresses at the same host that have not failed are worth remembering. Others are only their word, and
        a later start must not trust it.
        """
        for text, known in self._known.items():
            if connected.get(known.node_id) == known.host and not known.failures:
                self._known[text] = replace(known, met_at=now)

    def memorable(self) -> tuple[str, ...]:
        """Return addresses of nodes that were connected once, the most recent first, at most MAX_REMEMBERED.

        A node that is off now keeps its addresses: its owner starts it again tomorrow. An address that fails is left
        out only if its node has another one that does not.
        """
        met = [known for known in self._known.values() if known.has_worked or known.met_at > -inf]
        reachable = {known.node_id for known in met if not known.failures}
        kept = [known for known in met if not known.failures or known.node_id not in reachable]
        return tuple(a.text for a in sorted(kept, key=lambda a: -max(a.worked_at, a.met_at)))[:MAX_REMEMBERED]

    def _forget_worst(self) -> bool:
        """Forget one address: one that never worked if there is one, and among those the one that failed most.

        False if every address is given or works: no number of addresses from strangers replaces one of these.
        """
        needless = [a for a in self._known.values() if not a.is_given and (a.failures or not a.has_worked)]
        if not needless:
            return False
        del self._known[min(needless, key=lambda address: (address.has_worked, -address.failures)).text]
        return True


def _host_of(address: str) -> str:
    return (*address.split("/"), "", "", "")[2]


class RememberedAddresses(Struct, frozen=True):
    """Addresses of peers that worked, the best first."""

    addresses: Annotated[
        tuple[Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS)], ...], Meta(max_length=MAX_REMEMBERED)
    ]


def remembered_addresses(file: Path, on_damage: Literal["set_aside", "ignore"] = "set_aside") -> tuple[str, ...]:
    """Return the addresses that an earlier start stored; none if the file is missing, damaged or cannot be read."""
    try:
        stored = _addresses_in(file, on_damage).read()
    except StorageError as error:
        _LOG.warning("The remembered addresses of peers are not used: %s", error)
        return ()
    return () if stored is None else stored.addresses


def remember_addresses(file: Path, addresses: Iterable[str]) -> None:
    """Store addresses for the next start. A disk error is only logged."""
    try:
        _addresses_in(file).write(RememberedAddresses(tuple(addresses)[:MAX_REMEMBERED]))
    except StorageError as error:
        _LOG.warning("The addresses of peers cannot be stored: %s", error)


def _addresses_in(
    file: Path, on_damage: Literal["set_aside", "ignore"] = "set_aside"
) -> StateFile[RememberedAddresses]:
    return StateFile(
        file,
        RememberedAddresses,
        on_damage,
        "the peers of earlier starts must be found again",
        max_bytes=MAX_FILE_BYTES,
        data_dir=file.parent.parent,
    )


WANTED_CONNECTIONS = 8  # in a run of friends, with its members: strangers that connect take no place away
DIALS_AT_ONCE = 4
DIAL_SECONDS = 20.0
LOOK_SECONDS = 1.0
CLOSING_SECONDS = 10.0  # a network that does not close within this time is cancelled
REMEMBER_SECONDS = 5.0  # short, so that a node killed soon after its start finds the others again
SLEPT_SECONDS = 30.0  # the computer slept if this much time passed between two looks

NetworkOpener: TypeAlias = Callable[[], AbstractAsyncContextManager[Network]]
NetworkWork: TypeAlias = Callable[[Network], Coroutine[Any, Any, None]]
"""Work that ends with its network and starts again with the next one."""


class Networking:
    """Keeps a node's network up and connected to peers. `open_network` is None if the owner wants no network."""

    def __init__(
        self,
        node_id: NodeId,
        open_network: NetworkOpener | None,
        *,
        peers_file: Path,
        given: Sequence[str] = (),
        loopback_only: bool = False,
        gate: TransferPolicy | None = None,
    ) -> None:
        """Large transfers pass `gate`."""
        self.book = KnownAddresses(node_id)
        self.book.add(given, is_given=True)
        self._has_given = bool(given)
        self._open = open_network
        self._peers_file = peers_file
        self._loopback_only = loopback_only
        self._network: Network | None = None
        self._changed = Signal()
        self._works: list[NetworkWork] = []
        self._failure = ""
        self._was_up = False
        self.gate = gate or TransferPolicy()
        self._peer_check: PeerCheck | None = None
        self._is_reader: ReaderCheck | None = None
        self._forbidden = ""
        self._living: anyio.CancelScope | None = None

    def forbid(self, reason: str) -> None:
        """Close the network and keep it closed for the reason given by the owner's rules; "" opens it again."""
        self._forbidden = reason
        if reason and self._living is not None:
            self._living.cancel()
        self._changed.notify()

    def close_to_others(self, check: PeerCheck, is_reader: ReaderCheck | None = None) -> None:
        """Serve only the peers that `check` accepts, in this network and in all that follow.

        Those that only `is_reader` accepts may read.
        """
        self._peer_check, self._is_reader = check, is_reader
        if self._network is not None:
            self._network.gate.close(check, is_reader)

    @property
    def is_wanted(self) -> bool:
        """Whether this node connects to others at all."""
        return self._open is not None

    @property
    def meets_strangers(self) -> bool:
        """Whether the node may meet nodes that its owner did not name: on the local network or through given peers."""
        return self.is_wanted and (self._has_given or not self._loopback_only)

    @property
    def current(self) -> Network | None:
        """The network while it is up, otherwise None."""
        return self._network

    def attach(self, work: NetworkWork) -> None:
        """Run `work` with every network from now on; its failure restarts the network."""
        self._works.append(work)
        self._changed.notify()

    async def run(self, *, must_open: bool = False) -> None:
        """Keep the network up until cancelled.

        With `must_open`, raises NetworkRefusedError if the network cannot open the first time.
        """
        if self._open is None:
            return
        self.book.add(remembered_addresses(self._peers_file), is_remembered=True)

        def is_final(error: BaseException) -> bool:
            return must_open and not self._was_up and isinstance(error, NetworkRefusedError)

        while True:
            await self._changed.until(lambda: not self._forbidden)
            with anyio.CancelScope() as self._living:
                await keep_running("The network", self._live, self._report_failure, is_final=is_final)
            self._living = None

    async def up(self) -> Network:
        """Return the network, waiting until it is up. Waits forever if the owner wants no network."""
        while self._network is None:
            await self._changed.wait()
        return self._network

    def state(self) -> tuple[NetworkState, str]:
        """Return the state of the network and one sentence about it."""
        if self._open is None:
            return NetworkState.OFF, "The network is off; this computer trains alone."
        if self._forbidden:
            return NetworkState.OFF, self._forbidden
        if self._failure:
            return NetworkState.FAILED, f"The network does not work: {self._failure} Training continues without it."
        if self._network is None:
            return NetworkState.STARTING, "Connecting."
        count = len(self._network.transport.peers())
        if count:
            words = f"Connected with {count} other node{'s' if count > 1 else ''}. {self.gate.reason}"
            return NetworkState.CONNECTED, words.strip()
        return NetworkState.ALONE, self._why_alone()

    async def _live(self) -> None:
        """Open one network, use it, and close it after its users have ended.

        The network outlives its users, so that they can still send their last messages.
        """
        leave = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hold, leave)
            try:
                await self._use(await self.up())
            finally:
                self._network = None
                leave.set()

    async def _hold(self, leave: anyio.Event) -> None:
        """Keep one network open until `leave` is set. While it is open, cancellation of this node does not reach it."""
        assert self._open is not None
        with anyio.CancelScope() as scope:
            async with self._open() as network:
                # Shielded only once open: opening can be cancelled, but the users' last messages need the network
                # until `leave` is set. The deadline then ends a network that does not close.
                scope.shield = True
                if not leave.is_set():
                    if self._peer_check is not None:
                        network.gate.close(self._peer_check, self._is_reader)
                    gated = replace(network, transport=PolicyTransport(network.transport, self.gate))
                    self._network, self._failure, self._was_up = gated, "", True
                    self._changed.notify()
                await leave.wait()
                scope.deadline = anyio.current_time() + CLOSING_SECONDS

    async def _use(self, network: Network) -> None:
        _LOG.info("This node's own addresses: %s", ", ".join(network.transport.addresses()) or "no address")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_dialling, network)
                tasks.start_soon(self._keep_remembering, network)
                await self._start_works(network, tasks)
        finally:
            remember_addresses(self._peers_file, self.book.memorable())

    async def _start_works(self, network: Network, tasks: TaskGroup) -> None:
        """Start the work that is attached now, and later each new one."""
        begun = 0
        while True:
            for work in self._works[begun:]:
                tasks.start_soon(work, network)
            begun = len(self._works)
            await self._changed.wait()

    async def _keep_dialling(self, network: Network) -> None:
        limiter = anyio.CapacityLimiter(DIALS_AT_ONCE)
        slept = SleepDetector()
        async with anyio.create_task_group() as tasks:
            dialling: set[str] = set()
            while True:
                if slept.has_slept():
                    self.book.try_all_again()
                now = anyio.current_time()
                connected = network.transport.peers()
                served = [peer for peer in connected if not network.gate.refusal(peer)]
                for address in self._to_dial(now, connected, dialling, has_enough=len(served) >= WANTED_CONNECTIONS):
                    dialling.add(address.text)
                    tasks.start_soon(self._dial, network, address, limiter, dialling)
                await sleep_to_tick(LOOK_SECONDS)

    def _to_dial(
        self, now: float, connected: frozenset[NodeId], dialling: set[str], *, has_enough: bool
    ) -> list[KnownAddress]:
        """Addresses to dial now: all that are due while connections are missing, then only given ones."""
        due = self.book.given_due(now, connected) if has_enough else self.book.due(now, connected)
        return [address for address in due if address.text not in dialling][:DIALS_AT_ONCE]

    async def _dial(
        self, network: Network, address: KnownAddress, limiter: anyio.CapacityLimiter, dialling: set[str]
    ) -> None:
        try:
            async with limiter:
                with anyio.fail_after(DIAL_SECONDS):
                    await network.transport.connect(address.text, is_given=address.is_trusted)
        except (NeuroShardError, TimeoutError) as error:
            self.book.note_failure(address.text, anyio.current_time())
            level = logging.WARNING if address.is_given and address.failures == 0 else logging.DEBUG
            reason = str(error) or "no answer in time"
            _LOG.log(level, "%s does not answer and is tried again: %s", address.text, reason)
        else:
            self.book.note_success(address.text, anyio.current_time())
        finally:
            dialling.discard(address.text)

    async def _keep_remembering(self, network: Network) -> None:
        remembered = frozenset[str]()
        while True:
            await sleep_to_tick(REMEMBER_SECONDS)
            hosts = {one.peer: _host_of(one.address) for one in network.transport.connections()}
            self.book.note_met(hosts, anyio.current_time())
            memorable = self.book.memorable()
            if remembered != frozenset(memorable):  # their order changes with every connection
                remember_addresses(self._peers_file, memorable)
                remembered = frozenset(memorable)

    def _report_failure(self, reason: str, seconds: float) -> None:
        self._failure = f"{reason} Trying again in {seconds:.0f} s."

    def _why_alone(self) -> str:
        if self._has_given:
            return "No other node answers yet; this node keeps trying."
        if self._loopback_only:
            return "No other node is known on this computer."
        return "No other node was found yet."


class SleepDetector:
    """Notices that the computer slept: between two looks the calendar advanced much more than usual."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._last = now()

    def has_slept(self) -> bool:
        """Return whether more than SLEPT_SECONDS passed since the last call."""
        before, self._last = self._last, self._now()
        return self._last - before > SLEPT_SECONDS


REQUEST_DIAL_SECONDS = 10.0


@dataclass(frozen=True)
class DialledRequests:
    """Sends requests to members; dials a member at its announced addresses if it is not connected."""

    networking: Networking
    membership: Membership

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """Send a request as `Transport.request` does, after connecting to the peer if necessary.

        Raises PeerUnreachableError if the network is down or no announced address of the peer answers.
        """
        network = self.networking.current
        if network is None:
            raise PeerUnreachableError("The network is down at present.", "This node tries again.")
        if peer not in network.transport.peers():
            await self._dial(network, peer)
        return await network.transport.request(peer, frame, reply=reply, timeout_seconds=timeout_seconds)

    async def _dial(self, network: Network, peer: NodeId) -> None:
        announced = self.membership.announcements.get(peer)
        for address in () if announced is None else announced.addresses:
            with anyio.move_on_after(REQUEST_DIAL_SECONDS):
                try:
                    await network.transport.connect(address)
                except NeuroShardError:
                    continue
                return
        raise PeerUnreachableError(f"Node {peer} cannot be reached at any address that is known.")
