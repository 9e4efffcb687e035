"""Nodes on one local network find each other by multicast DNS, with no other computer's help.

A node says where it is when it begins and when somebody asks, and that it leaves when it ends; in between it is quiet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from ipaddress import ip_address
from random import Random, SystemRandom

import anyio
import trio

from neuroshard.network.allowance import Allowance
from neuroshard.network.nearby_places import GROUP, PORT, Interface, Place, lan_interfaces, open_socket, places_of
from neuroshard.network.nearby_records import Heard, announcement, heard, question
from neuroshard.network.transport import Network
from neuroshard.types import NodeId

log = logging.getLogger(__name__)

INTRODUCTION_SECONDS = (0.0, 1.0, 2.0)  # pauses before each time that a node says where it is and asks for others
FIRST_DELAY_SECONDS = 0.1  # at most, random: computers that get power at once shall not speak at once
ANSWER_DELAY_SECONDS = (0.02, 0.12)
ANSWER_PAUSE_SECONDS = 1.0  # between two answers, however many ask
LOOK_SECONDS = 10.0  # between looks whether this computer came into another network
RETRY_SECONDS = 300.0  # after what failed; also between questions of a node without any connection
GOODBYE_SECONDS = 1.0
MAX_DATAGRAM_BYTES = 65_536
PACKETS_A_SECOND = 100.0  # that are read; what comes beyond that waits in the system's own buffer, or is lost
MAX_FOUND = 256  # addresses remembered as told
NEW_ADDRESSES = 64  # at once, then
NEW_ADDRESSES_A_SECOND = 1.0


class Findings:
    """Passes addresses on to `tell`; new ones only as fast as real nodes appear."""

    def __init__(self, own_id: NodeId, tell: Callable[[Iterable[str]], None]) -> None:
        self._own_end = f"/p2p/{own_id}"
        self._tell = tell
        self._told: dict[str, None] = {}  # the oldest first
        self._new = Allowance(NEW_ADDRESSES, NEW_ADDRESSES_A_SECOND)

    def add(self, addresses: Iterable[str], now: float) -> None:
        """Tell what may be told: other nodes' addresses, known ones always."""
        for address in addresses:
            if address.endswith(self._own_end) or (address not in self._told and not self._new.take(now)):
                continue
            self._told.pop(address, None)
            self._told[address] = None
            if len(self._told) > MAX_FOUND:
                del self._told[next(iter(self._told))]
            self._tell((address,))


@dataclass
class Nearby:
    """Attached to a node's networking. `tell` gets the multiaddrs of other nodes; they are checked in form only."""

    node_id: NodeId
    tell: Callable[[Iterable[str]], None]
    interfaces: Callable[[], tuple[Interface, ...]] = lan_interfaces
    random: Random = field(default_factory=SystemRandom)
    _has_complained: bool = False

    async def live(self, network: Network) -> None:
        """Find and be found as long as this network lives; what fails is tried again later."""
        findings = Findings(self.node_id, self.tell)
        while True:
            places = self._places(network)
            has_failed = anyio.Event()
            with ExitStack() as sockets:
                async with anyio.create_task_group() as tasks:
                    for place in places:
                        channel = self._opened(place, sockets)
                        if channel is None:
                            has_failed.set()
                        else:
                            tasks.start_soon(self._serve, channel, network, findings, has_failed)
                    await self._wait_for_change(network, places, has_failed)
                    tasks.cancel_scope.cancel()

    def _places(self, network: Network) -> tuple[Place, ...]:
        return places_of(network.transport.addresses(), self.interfaces())

    async def _wait_for_change(self, network: Network, places: Sequence[Place], has_failed: anyio.Event) -> None:
        """Until this node is dialled elsewhere, or it is time to try again what failed."""
        failed_at: float | None = None
        while self._places(network) == places:
            await anyio.sleep(LOOK_SECONDS)
            if has_failed.is_set():
                failed_at = failed_at or anyio.current_time()
                if anyio.current_time() - failed_at >= RETRY_SECONDS:
                    return

    def _opened(self, place: Place, sockets: ExitStack) -> _Channel | None:
        try:
            sock = open_socket(place.interface)
        except OSError as error:
            self._complain(place, error)
            return None
        sockets.callback(sock.close)
        return _Channel(self.node_id, place, sock)

    async def _serve(self, channel: _Channel, network: Network, findings: Findings, has_failed: anyio.Event) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._introduce, channel, network)
                tasks.start_soon(self._answer, channel)
                tasks.start_soon(_listen, channel, findings)
        except* OSError as group:
            self._complain(channel.place, group.exceptions[0])
            has_failed.set()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(GOODBYE_SECONDS):
                await channel.say_goodbye()

    async def _introduce(self, channel: _Channel, network: Network) -> None:
        """Say where this node is and ask who else is there; later only ask, and only while it knows nobody."""
        await anyio.sleep(self.random.uniform(0, FIRST_DELAY_SECONDS))
        for seconds in INTRODUCTION_SECONDS:
            await anyio.sleep(seconds)
            await channel.ask()
            await channel.say()
        while True:
            await anyio.sleep(RETRY_SECONDS)
            if not network.transport.peers():
                await channel.ask()

    async def _answer(self, channel: _Channel) -> None:
        """Whoever asks is answered, all who ask in the same second together."""
        while True:
            await channel.asked.wait()
            earliest = channel.said_at + ANSWER_PAUSE_SECONDS
            await anyio.sleep(self.random.uniform(*ANSWER_DELAY_SECONDS))
            await anyio.sleep_until(earliest)
            channel.asked = anyio.Event()
            await channel.say()

    def _complain(self, place: Place, error: BaseException) -> None:
        level = logging.DEBUG if self._has_complained else logging.INFO
        self._has_complained = True
        log.log(level, "Nodes on the local network of %s are not looked for now: %s", place.interface.name, error)


class _Channel:
    """One node's multicast socket on one interface."""

    def __init__(self, node_id: NodeId, place: Place, sock: trio.socket.SocketType) -> None:
        self.place = place
        self.asked = anyio.Event()
        self.said_at = float("-inf")
        self._node_id = node_id
        self._socket = sock

    async def ask(self) -> None:
        """Ask who is there. Raises OSError."""
        await self._socket.sendto(question(self._node_id), (GROUP, PORT))

    async def say(self) -> None:
        """Say where this node is. Raises OSError."""
        self.said_at = anyio.current_time()
        await self._socket.sendto(announcement(self._node_id, self.place.hosts, self.place.port), (GROUP, PORT))

    async def say_goodbye(self) -> None:
        """Say that this node leaves, when it ever said that it is there. A network that is gone needs no good-bye."""
        if self.said_at == float("-inf"):
            return
        packet = announcement(self._node_id, self.place.hosts, self.place.port, is_goodbye=True)
        try:
            await self._socket.sendto(packet, (GROUP, PORT))
        except OSError as error:
            log.debug("No good-bye on %s: %s", self.place.interface.name, error)

    async def receive(self) -> Heard:
        """What the next packet says; nothing when it comes from outside the interface's networks. Raises OSError."""
        packet, (host, port, *_) = await self._socket.recvfrom(MAX_DATAGRAM_BYTES)
        source, networks = ip_address(host), self.place.interface.networks
        is_local = port == PORT and any(source in network for network in networks)
        return heard(packet, self._node_id, networks) if is_local else Heard()


async def _listen(channel: _Channel, findings: Findings) -> None:
    pace = Allowance(PACKETS_A_SECOND, PACKETS_A_SECOND)
    while True:
        while not pace.take(anyio.current_time()):
            await anyio.sleep(1 / PACKETS_A_SECOND)
        said = await channel.receive()
        if said.is_question:
            channel.asked.set()
        findings.add(said.addresses, anyio.current_time())
