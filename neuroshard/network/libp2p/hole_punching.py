"""Hole punching: both sides of a relayed connection dial at the same moment, so that both routers open
(libp2p specification "Direct Connection Upgrade through Relay", TCP simultaneous open).

Each side sends the addresses at which other peers observed it, because its router may translate its own ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import anyio
from libp2p.abc import INetConn, INetStream
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from multiaddr import Multiaddr

from neuroshard.errors import UsageError
from neuroshard.network.crowds import network_of
from neuroshard.network.libp2p.addresses import PeerAddress, parse_address
from neuroshard.network.libp2p.connections import Connections
from neuroshard.network.libp2p.host import stream_of
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import confirm, proposal
from neuroshard.network.libp2p.peer_limits import contain_errors
from neuroshard.network.libp2p.relay_messages import MESSAGE_SECONDS, RelayError, encode_message, read_message
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId

MAX_OBSERVERS = 64
KEPT_SECONDS = 3600.0  # after the end of the observer's connection
CONFIRMED_BY = 2  # observers, before an address is announced


@dataclass
class _Observation:
    text: str
    muxer: BoundedMuxer  # while it is open, the address is valid
    made_at: float
    held_at: float  # when the address was last known to be valid


class ObservedAddresses:
    """The newest report of each observer, by its IP address (IPv6: /64)."""

    def __init__(self, when_moved: Callable[[], None] = lambda: None) -> None:
        """`when_moved` is called with an IP address at which no peer observed this node before."""
        self._when_moved = when_moved
        self._by_observer: dict[str, _Observation] = {}

    def record(self, muxer: BoundedMuxer, observed: Multiaddr, local: Iterable[Multiaddr]) -> None:
        """Record where a peer observed this node. Only connections from the listening port count."""
        address, text = muxer.get_remote_address(), str(observed)
        if not muxer.is_from_listening_port or address is None:
            return
        known, observer = self._current(), network_of(address[0], 32)
        self._by_observer.pop(observer, None)
        if text in {str(one) for one in local}:
            return
        while len(self._by_observer) >= MAX_OBSERVERS:
            del self._by_observer[min(self._by_observer, key=lambda ip: self._by_observer[ip].held_at)]
        now = anyio.current_time()
        self._by_observer[observer] = _Observation(text, muxer, made_at=now, held_at=now)
        if known and _ip_of(text) not in {_ip_of(one.text) for one in known}:
            self._when_moved()

    def remove_conn(self, conn: INetConn) -> None:
        """Note the end of a connection. Its report stays valid for a while."""

    def addrs(self) -> list[Multiaddr]:
        """Addresses with several observers: the router uses the same one for all peers."""
        seen = [one.text for one in self._current()]
        return [Multiaddr(text) for text in self.likely() if seen.count(text) >= CONFIRMED_BY]

    def likely(self) -> list[str]:
        """All observed addresses: first those of open connections, then by number of observers, then by age."""
        by_text: dict[str, list[_Observation]] = {}
        for one in self._current():
            by_text.setdefault(one.text, []).append(one)

        def rank(text: str) -> tuple[int, float]:
            return sum(not one.muxer.is_closed for one in by_text[text]), max(one.made_at for one in by_text[text])

        return sorted(by_text, key=rank, reverse=True)

    def _current(self) -> list[_Observation]:
        now = anyio.current_time()
        for one in self._by_observer.values():
            if not one.muxer.is_closed:
                one.held_at = now
        self._by_observer = {ip: one for ip, one in self._by_observer.items() if now - one.held_at < KEPT_SECONDS}
        return list(self._by_observer.values())


def _ip_of(text: str) -> str:
    return "/".join(text.split("/")[:3])


PUNCH_PROTOCOL = "/libp2p/dcutr"
MAX_ADDRESSES = 8
ROUNDS = 3
ROUND_SECONDS = 4.0
FIRST_PAUSE_SECONDS = 0.1
AGAIN_SECONDS = 60.0  # until a peer may ask again
LEAVE_RELAY_SECONDS = 20.0  # for requests in progress on the relay
_LOG = logging.getLogger(__name__)


class HolePuncher:
    """Replaces relayed connections by direct ones."""

    def __init__(
        self,
        connections: Connections,
        observed: ObservedAddresses,
        own_addresses: Callable[[], Sequence[str]],
        may_follow: Callable[[PeerAddress], bool],
    ) -> None:
        """`may_follow` decides whether an address claimed by a peer behind a relay may be dialled."""
        self._connections = connections
        self._observed = observed
        self._own_addresses = own_addresses
        self._may_follow = may_follow
        self._asked_at: dict[NodeId, list[float]] = {}

    async def upgrade(self, peer: NodeId) -> None:
        """Agree with a peer on a moment, and dial. Runs on the side that accepted the relayed connection."""
        relayed = self._connections.of(peer)
        for number in range(ROUNDS):
            if relayed is None or self._connections.kind_of(peer) is not ConnectionKind.RELAYED:
                return
            addresses, round_trip = await self._agreed(relayed, peer)
            await anyio.sleep(round_trip / 2)
            is_direct = await self._dial(peer, addresses, is_client=False)
            if is_direct or (number == 0 and await self._reverse(addresses)):
                await self._leave_relay(relayed)
                return

    async def _reverse(self, addresses: Sequence[PeerAddress]) -> bool:
        """Dial without the peer's help. Its router may let everybody in while this one changes the port each time."""
        found: list[BoundedMuxer] = []

        async def attempt(address: PeerAddress) -> None:
            muxer = await self._connections.reach(address)
            if muxer is not None:
                found.append(muxer)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for address in addresses:
                tasks.start_soon(attempt, address)
        return bool(found)

    async def handle_stream(self, net_stream: INetStream) -> None:
        """Dial when the peer asks for it. Runs on the side that dialled the relayed connection."""
        stream, peer = stream_of(net_stream), NodeId(str(net_stream.muxed_conn.peer_id))
        try:
            self._check_may_ask(peer)
            with anyio.fail_after(MESSAGE_SECONDS):
                addresses = self._usable(await read_message(stream, HolePunch()), peer)
                self._connections.expect(addresses)
                await stream.write(encode_message(self._own()))
                sync = await read_message(stream, HolePunch())
            if sync.type == HolePunch.SYNC:
                await self._dial(peer, addresses, is_client=True)
        finally:
            stream.abandon()

    async def _agreed(self, relayed: BoundedMuxer, peer: NodeId) -> tuple[list[PeerAddress], float]:
        """The peer's addresses and the round trip to it; it dials now. Raises BaseLibp2pError or TimeoutError."""
        stream = await relayed.open_stream()
        try:
            with anyio.fail_after(MESSAGE_SECONDS):
                await stream.write(proposal(PUNCH_PROTOCOL))
                await confirm(stream, PUNCH_PROTOCOL)
                asked_at = anyio.current_time()
                await stream.write(encode_message(self._own()))
                message = await read_message(stream, HolePunch())
                round_trip = anyio.current_time() - asked_at
                addresses = self._usable(message, peer)
                self._connections.expect(addresses)
                await stream.write(encode_message(HolePunch(type=HolePunch.SYNC)), is_last=True)
        except BaseException:
            stream.abandon()
            raise
        return addresses, round_trip

    async def _dial(self, peer: NodeId, addresses: Sequence[PeerAddress], *, is_client: bool) -> bool:
        """Dial the addresses. Returns True if one led to a direct connection."""
        found: list[BoundedMuxer] = []

        async def attempt(address: PeerAddress) -> None:
            until, pause = anyio.current_time() + ROUND_SECONDS, FIRST_PAUSE_SECONDS
            while anyio.current_time() < until:  # a router may answer the first attempt with a reset
                if self._connections.kind_of(peer) is ConnectionKind.PUNCHED:
                    tasks.cancel_scope.cancel()  # the other side's connection arrived
                muxer = await self._connections.punch(address, is_client=is_client)
                if muxer is not None:
                    found.append(muxer)
                    tasks.cancel_scope.cancel()
                await anyio.sleep(pause)
                pause *= 2  # each attempt counts in the budget of dials for its host

        with anyio.move_on_after(ROUND_SECONDS):
            async with anyio.create_task_group() as tasks:
                for address in addresses:
                    tasks.start_soon(attempt, address)
        _LOG.debug("A direct connection with %s: %s", peer, "made" if found else "not yet")
        return bool(found) or self._connections.kind_of(peer) is ConnectionKind.PUNCHED

    async def _leave_relay(self, relayed: BoundedMuxer) -> None:
        await anyio.sleep(LEAVE_RELAY_SECONDS)
        await contain_errors(relayed.close(), "Leaving a relay")

    def _own(self) -> HolePunch:
        texts = (*self._observed.likely(), *self._own_addresses())
        return HolePunch(
            type=HolePunch.CONNECT, ObsAddrs=[Multiaddr(text).to_bytes() for text in texts[:MAX_ADDRESSES]]
        )

    def _usable(self, message: HolePunch, peer: NodeId) -> list[PeerAddress]:
        """The addresses in a message that can be dialled."""
        usable: list[PeerAddress] = []
        for data in message.ObsAddrs[:MAX_ADDRESSES]:
            try:
                usable.append(parse_address(f"{Multiaddr(data)}/p2p/{peer}"))
            except (UsageError, ValueError):
                continue
        return [address for address in usable if self._may_follow(address)]

    def _check_may_ask(self, peer: NodeId) -> None:
        """Raise RelayError unless this peer may ask: peers must not make this node dial freely."""
        since = anyio.current_time() - AGAIN_SECONDS
        self._asked_at = {node: at for node, at in self._asked_at.items() if at[-1] > since}
        asked = [at for at in self._asked_at.get(peer, []) if at > since]
        if self._connections.kind_of(peer) is not ConnectionKind.RELAYED or len(asked) >= ROUNDS:
            raise RelayError("there is no relay to leave, or it was tried too often")
        self._asked_at[peer] = [*asked, anyio.current_time()]
