"""The failure detector: drops a disconnected node that has ended, or that misses its next report and cannot be called.

| the connection is lost and | the node is dropped after |
| --- | --- |
| its computer answers that no program listens at an announced port | ABSENCE_SECONDS |
| no announced address can be called | OVERDUE report intervals without a report |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import anyio

from neuroshard.errors import NeuroShardError
from neuroshard.membership.swarm_view import Member, Membership
from neuroshard.network import Connection, Network, NobodyListensError
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId
from neuroshard.waiting import sleep_to_tick

LOOK_SECONDS = 1.0
ABSENCE_SECONDS = 2.0  # time without a connection before a node is called
CALL_SECONDS = 3.0  # for all its addresses
OVERDUE = 1.2  # report intervals without a report before a node is called


class FailureDetector:
    """Takes nodes that are gone out of the membership, although others may still report about them for a while.

    One object serves for the life of a node.
    """

    def __init__(self, membership: Membership, now: Callable[[], float] = time.time) -> None:
        self._membership = membership
        self._now = now

    async def watch_forever(self, network: Network) -> None:
        """Check every second for lost connections. Ends with TransportClosedError when the network closes."""
        connected = frozenset[NodeId]()
        lost_at: dict[NodeId, float] = {}
        hosts: dict[NodeId, str] = {}
        async with anyio.create_task_group() as tasks:
            while True:
                before, now = connected, anyio.current_time()
                connected = network.transport.peers()
                members = self._membership.view.members
                for peer in members.keys() & (before - connected) & hosts.keys():
                    tasks.start_soon(self._call_early, network, peer, hosts[peer])
                if connected != before:
                    hosts = {one.peer: _host(one.address) for one in network.transport.connections() if _is_direct(one)}
                lost_at |= dict.fromkeys(before - connected, now)
                lost_at = {peer: at for peer, at in lost_at.items() if peer in members and peer not in connected}
                for peer in [peer for peer, at in lost_at.items() if self._is_due(members, peer, now - at)]:
                    del lost_at[peer]
                    tasks.start_soon(self._call, network, peer)
                await sleep_to_tick(LOOK_SECONDS)

    def _is_due(self, members: Mapping[NodeId, Member], peer: NodeId, absent_seconds: float) -> bool:
        """Whether a node has been disconnected and silent long enough to be called."""
        member = members[peer]
        is_silent = self._now() - member.last_seen >= OVERDUE * member.report.interval_seconds
        return absent_seconds >= ABSENCE_SECONDS and is_silent

    async def _call_early(self, network: Network, peer: NodeId, host: str) -> None:
        """Drop a node whose computer, at `host`, refuses connections at the announced ports: its program has ended.

        A node behind a router or a firewall is called like every other one, and its silence decides.
        """
        await anyio.sleep(ABSENCE_SECONDS)  # it may connect again, or start again
        announced = self._membership.announcements.get(peer)
        addresses = [] if announced is None else [one for one in announced.addresses if _host(one) == host]
        has_ended = False
        for address in addresses:
            with anyio.move_on_after(CALL_SECONDS):
                try:
                    await network.transport.connect(address)
                except NobodyListensError:
                    has_ended = True
                    continue
                except NeuroShardError:
                    pass
            return
        if has_ended:
            self._membership.drop(peer)

    async def _call(self, network: Network, peer: NodeId) -> None:
        """Drop a node that does not accept a connection, unless a report of it arrives meanwhile."""
        member = self._membership.view.members.get(peer)
        announced = self._membership.announcements.get(peer)
        with anyio.move_on_after(CALL_SECONDS):
            for address in () if announced is None else announced.addresses:
                try:
                    await network.transport.connect(address)
                except NeuroShardError:
                    continue
                return
        # a report during the call replaces the member, so an unchanged one was silent all the time
        if member is not None and self._membership.view.members.get(peer) is member:
            self._membership.drop(peer)


def _is_direct(connection: Connection) -> bool:
    return connection.kind is ConnectionKind.DIRECT


def _host(address: str) -> str:
    """The part of a multiaddr that names a computer, such as /ip4/192.0.2.7."""
    return "/".join(address.split("/")[:3])
