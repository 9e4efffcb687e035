from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from typing import Any

import anyio
import pytest
import trio

from neuroshard.messages import Frame
from neuroshard.network import Network, NobodyListensError, PeerUnreachableError, TransportClosedError
from neuroshard.network.libp2p import NetworkFailedError, libp2p_network
from neuroshard.network.libp2p.connections import IDLE_SECONDS
from neuroshard.network.tcp_options import UNSENT_BYTES
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import LOOPBACK, address_of, echo, nodes, run


def test_a_defect_in_the_background_ends_the_block_with_its_cause() -> None:
    async def scenario() -> None:
        network: Network | None = None

        def fail(_: float) -> None:
            raise ZeroDivisionError

        async def live() -> None:
            nonlocal network
            async with libp2p_network(identity_of(1), LOOPBACK) as network:
                network.gossip.router.heartbeat = fail
                await anyio.sleep(30)

        with pytest.raises(NetworkFailedError) as failed:
            await live()
        assert isinstance(failed.value.__cause__, ExceptionGroup)
        assert failed.value.__cause__.subgroup(ZeroDivisionError) is not None
        assert network is not None
        with pytest.raises(TransportClosedError):
            await network.transport.request(identity_of(2).node_id, Frame("x"), timeout_seconds=60)

    run(scenario)


def test_a_cancelled_block_ends_at_once_and_quietly() -> None:
    async def scenario() -> None:
        async with nodes(1) as (other,):
            began = trio.current_time()
            with trio.move_on_after(0.5):
                async with libp2p_network(identity_of(9), LOOPBACK) as network:
                    await network.transport.connect(address_of(other))
                    await anyio.sleep_forever()
            assert trio.current_time() - began < 20
            await until(lambda: other.transport.connections() == ())

    run(scenario)


def test_a_program_that_has_ended_is_told_from_one_that_cannot_be_reached() -> None:
    """The failure detector drops the first at once."""

    async def scenario() -> None:
        async with nodes(1) as (node,):
            async with libp2p_network(identity_of(9), LOOPBACK) as ended:
                address = address_of(ended)
                await node.transport.connect(address)
            await until(lambda: node.transport.connections() == ())
            with pytest.raises(NobodyListensError):
                await node.transport.connect(address)
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listener.socket.getsockname()[1]
            async with trio.open_nursery() as tasks:
                tasks.start_soon(trio.serve_listeners, trio.SocketStream.aclose, [listener])
                with pytest.raises(PeerUnreachableError) as raised:
                    await node.transport.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity_of(9).node_id}")
                tasks.cancel_scope.cancel()
            assert not isinstance(raised.value, NobodyListensError)

    run(scenario)


def test_connections_that_nobody_uses_are_ended_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with nodes(1) as (centre,), nodes(6, first=2) as others:
            centre.transport.serve("echo", echo)
            for other in others:
                await other.transport.connect(address_of(centre))
            connections = centre.transport._connections
            await anyio.sleep(2)  # the streams of the first moments
            for other in others:
                muxer = connections.of(other.transport.local_id)
                assert muxer is not None
                muxer.used_at -= 2 * IDLE_SECONDS
            assert connections._needless(set()) == []  # few enough
            monkeypatch.setattr("neuroshard.network.libp2p.connections.KEPT_PEERS", 3)
            await others[0].transport.request(centre.transport.local_id, Frame("echo"), timeout_seconds=60)
            needless = connections._needless({others[1].transport.local_id})
            assert len(needless) == 3
            assert not set(needless) & {others[0].transport.local_id, others[1].transport.local_id}
            for peer in needless:
                await connections.close_peer(peer)
            assert len(centre.transport.connections()) == 3

    run(scenario)


def test_the_package_is_imported_without_libp2p() -> None:
    code = "import sys, neuroshard.network.libp2p; sys.exit('libp2p' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have neither option")
def test_both_ends_send_by_the_chosen_congestion_control_and_queue_little() -> None:
    async def scenario() -> None:
        async with nodes(2, replace(LOOPBACK, congestion_control="reno")) as (a, b):
            await b.transport.connect(address_of(a))
            for near, far in ((a, b), (b, a)):
                muxer: Any = near.transport._connections.of(far.transport.local_id)
                stream = muxer.secured_conn._conn.stream._stream
                name = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert name.rstrip(b"\0") == b"reno"
                assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES

    run(scenario)
