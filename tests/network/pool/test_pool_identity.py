from __future__ import annotations

from dataclasses import replace

import pytest

from neuroshard.network import PeerUnreachableError, ScoreReason
from neuroshard.network.pool.greeting import receive_bytes
from neuroshard.network.pool.options import ConnectionLostError
from neuroshard.network.pool.transfers import PacketKind
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import POOL_LOOPBACK, before_greeting, frame_of, node, run, stranger, two_nodes


def test_a_listener_with_another_key_is_told_nothing() -> None:
    async def scenario() -> None:
        async with two_nodes() as (a, b), node(3) as c:
            with pytest.raises(PeerUnreachableError, match="handshake failed"):
                await a.ask(b, frame_of(b"secret"), via=c.door.endpoint())
            assert c.heard == []
            assert a.id not in c.pool.traffic()
            assert (await a.ask(b, frame_of(b"fine"))).tensors[0].data == b"fine"

    run(scenario)


@pytest.mark.parametrize("data", [b"", b"short"])
def test_who_does_not_greet_in_time_is_turned_away(data: bytes) -> None:
    async def scenario() -> None:
        async with node(2, replace(POOL_LOOPBACK, handshake_seconds=0.5)) as b:
            stream = await before_greeting(b)
            if data:
                await stream.send_all(data)
            with pytest.raises(ConnectionLostError):
                await receive_bytes(stream, 9)
            stream.close()
            await until(lambda: b.pool.turned_away == 1)

    run(scenario)


def test_a_banned_peer_is_not_welcome_and_not_dialled() -> None:
    async def scenario() -> None:
        async with two_nodes() as (a, b):
            for _ in range(10):
                b.reputation.report(a.id, ScoreReason.MALFORMED_FRAME)
            assert b.reputation.is_banned(a.id)
            with pytest.raises(PeerUnreachableError, match="does not accept this node"):
                await a.ask(b, frame_of(b"x"))
            with pytest.raises(PeerUnreachableError, match="banned"):
                await b.ask(a, frame_of(b"x"))

    run(scenario)


def test_a_ban_ends_the_connections_that_are_open() -> None:
    async def scenario() -> None:
        async with node(2) as b, stranger(b, 9) as liar:
            told: list[PacketKind] = []

            async def lie() -> None:
                for number in range(1, 100):
                    await liar.send(PacketKind.OFFER, number, b"this is no frame, whatever the length of it")
                    told.append((await liar.receive())[0].kind)

            with pytest.raises(ConnectionLostError):
                await lie()
            assert set(told) == {PacketKind.REFUSE}
            assert b.reputation.is_banned(identity_of(9).node_id)
            await until(lambda: b.pool.connection_count == 0)

    run(scenario)
