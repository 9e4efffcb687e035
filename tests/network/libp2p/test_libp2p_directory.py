from __future__ import annotations

import time
from collections.abc import Sequence

import anyio
import pytest

from neuroshard.errors import DataError
from neuroshard.identity import MalformedClaimError, read_claim, sign_claim
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import (
    MessageTooLargeError,
    Network,
    PeerRefusedError,
    PeerUnreachableError,
    Reputation,
    ScoreReason,
    TransportClosedError,
)
from neuroshard.network.libp2p import NetworkParts, libp2p_network
from neuroshard.network.libp2p.directory import FindAnswer, FindRequest, FoundNode, Stored, StoreRequest
from neuroshard.network.transport import DirectoryRecord
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import LOOPBACK, address_of, nodes, run

SPACE = "run/0"


def record(number: int, text: str = "", at: float | None = None, kind: str = "announcement") -> bytes:
    return sign_claim(identity_of(number), kind, {"text": text}, time.time() if at is None else at).encode()


class Text(DirectoryRecord, frozen=True):
    """The payload of the records here."""

    text: str


def texts(records: Sequence[bytes]) -> list[str]:
    return sorted(read_claim(data, Text).payload.text for data in records)


async def acquainted(networks: Sequence[Network]) -> None:
    """Everybody knows the first one, and has looked around once."""
    for network in networks[1:]:
        await network.transport.connect(address_of(networks[0]))
    for network in networks:
        await network.directory._look_around(0)


def test_what_nodes_announce_is_found_by_all_others() -> None:
    async def scenario() -> None:
        async with nodes(14) as networks:
            await acquainted(networks)
            for number, network in enumerate(networks[:8], 1):
                await network.directory.announce(SPACE, record(number, f"node {number}"))
            expected = sorted(f"node {number}" for number in range(1, 9))
            for network in (networks[0], networks[10], networks[13]):
                assert texts(await network.directory.find(SPACE)) == expected
            assert len(await networks[13].directory.find(SPACE, limit=5)) == 5
            assert await networks[13].directory.find("run/1") == ()

    run(scenario)


def test_the_newest_announcement_counts_and_a_lone_node_keeps_its_own() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            with pytest.raises(PeerUnreachableError, match="No other node keeps"):
                await a.directory.announce(SPACE, record(1, "alone"))
            assert texts(await a.directory.find(SPACE)) == ["alone"]
            await b.transport.connect(address_of(a))
            assert texts(await b.directory.find(SPACE)) == ["alone"]
            await a.directory.announce(SPACE, record(1, "newer"))
            assert texts(await b.directory.find(SPACE)) == ["newer"]
            await a.directory.announce(SPACE, record(1, "older", time.time() - 100))
            assert texts(await b.directory.find(SPACE)) == ["newer"]

    run(scenario)


def test_a_node_announces_only_itself() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            await b.transport.connect(address_of(a))
            for lie in (record(9), record(2, kind="report"), b"no record", record(2, at=time.time() - 7200)):
                with pytest.raises(DataError):
                    await b.directory.announce(SPACE, lie)
            with pytest.raises(MessageTooLargeError):
                await b.directory.announce(SPACE, record(2, "x" * 20_000))
            with pytest.raises(ValueError, match="namespace"):
                await b.directory.announce("", record(2))

    run(scenario)


def test_lies_that_peers_store_are_refused_counted_and_cost_reputation() -> None:
    async def scenario() -> None:
        opinions = [Reputation(), Reputation()]
        async with nodes(2, parts=lambda i: NetworkParts(reputation=opinions[i])) as (a, b):
            await b.transport.connect(address_of(a))
            lies = {
                ScoreReason.BAD_RECORD: record(9),
                ScoreReason.MALFORMED_CLAIM: b"garbage",
                ScoreReason.EXPIRED_CLAIM: record(2, at=time.time() - 86_400),
            }
            for lie in lies.values():
                with pytest.raises(PeerRefusedError, match="The record was refused"):
                    await b.transport.request(
                        a.transport.local_id,
                        Frame("directory/store", StoreRequest(SPACE, lie)),
                        timeout_seconds=60,
                    )
            for header in ({}, {"namespace": 5, "record": ""}, {"namespace": SPACE, "record": "text"}):
                with pytest.raises(PeerRefusedError):
                    await b.transport.request(
                        a.transport.local_id, Frame("directory/store", header), timeout_seconds=60
                    )
            assert a.directory.refused == dict.fromkeys(lies, 1)
            assert {reason for reason, _ in opinions[0].refused()} == {ScoreReason.MALFORMED_FRAME.value, *lies}
            assert await a.directory.find(SPACE) == ()

    run(scenario)


def test_records_that_say_what_no_record_says_are_refused_by_whoever_keeps_them() -> None:
    async def scenario() -> None:
        opinion = Reputation()
        checks = [NetworkParts(reputation=opinion, record_form=Text), NetworkParts()]
        async with nodes(2, parts=lambda i: checks[i]) as (a, b):
            await b.transport.connect(address_of(a))
            odd = sign_claim(identity_of(2), "announcement", {"no": "text"}, time.time()).encode()
            with pytest.raises(PeerUnreachableError, match="No other node keeps"):  # b itself would keep anything
                await b.directory.announce(SPACE, odd)
            assert a.directory.refused == {ScoreReason.MALFORMED_CLAIM: 1}
            assert opinion.score(b.transport.local_id) < -20
            with pytest.raises(MalformedClaimError):
                await a.directory.announce(SPACE, sign_claim(identity_of(1), "announcement", {}, time.time()).encode())
            assert await a.directory.find(SPACE) == ()  # b gives it, and loses more by that
            assert a.directory.refused == {ScoreReason.MALFORMED_CLAIM: 2}
            await b.directory.announce(SPACE, record(2, "well"))
            assert texts(await a.directory.find(SPACE)) == ["well"]

    run(scenario)


def test_a_directory_full_of_lies_shows_the_truth() -> None:
    async def scenario() -> None:
        opinions = [Reputation() for _ in range(8)]
        async with nodes(8, parts=lambda i: NetworkParts(reputation=opinions[i])) as networks:
            liars, honest = networks[:3], networks[3:]
            false = [record(9, "forged").replace(b"forged", b"forger"), b"garbage" * 100, record(9, at=1.0)]
            nowhere = [
                FoundNode(identity_of(n).node_id, (f"/ip4/127.0.0.1/tcp/1/p2p/{identity_of(n).node_id}",))
                for n in range(50, 60)
            ]
            for liar in liars:

                async def lie(_: NodeId, question: Frame, liar: Network = liar) -> Frame:
                    if question.kind == "directory/store":
                        return Frame("directory/store", Stored())  # and forget it
                    if liar is liars[1]:
                        return Frame("directory/find", {"nodes": [["x"], [1, 2], None], "records": [5, None]})
                    odd = FoundNode("12D3KooWshort", ("/ip4/1.1.1.1/tcp/1",))
                    return Frame("directory/find", FindAnswer((odd, *nowhere), tuple(false)))

                for kind, asked in (("directory/find", FindRequest), ("directory/store", StoreRequest)):
                    liar.transport._server._served.pop(kind)
                    liar.transport.serve(kind, lie, FrameLimits(message=asked))
            for network in honest:
                for other in networks[:4]:
                    if other is not network:
                        await network.transport.connect(address_of(other))
            for number, network in enumerate(honest, 4):
                await network.directory.announce(SPACE, record(number, f"node {number}"))
            expected = sorted(f"node {number}" for number in range(4, 9))
            for network in honest:
                assert texts(await network.directory.find(SPACE)) == expected
            liar_id = liars[0].transport.local_id
            assert any(opinion.score(liar_id) < 0 for opinion in opinions[3:])
            assert honest[-1].directory.refused[ScoreReason.MALFORMED_CLAIM] > 0

    run(scenario)


def test_records_outlive_the_node_that_kept_them_first() -> None:
    async def scenario() -> None:
        async with nodes(6) as networks:
            await acquainted(networks)
            await networks[1].directory.announce(SPACE, record(2, "here"))
            async with nodes(1, first=40) as (late,):
                await late.transport.connect(address_of(networks[5]))
                assert texts(await late.directory.find(SPACE)) == ["here"]
                await networks[0].transport.close()
                assert texts(await late.directory.find(SPACE)) == ["here"]

    run(scenario)


def test_a_clock_that_is_off_by_a_day_hides_nobody_else() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b), libp2p_network(identity_of(3), LOOPBACK, lambda: time.time() + 86_400) as c:
            for network in (b, c):
                await network.transport.connect(address_of(a))
            await b.directory.announce(SPACE, record(2, "right"))
            with pytest.raises(PeerUnreachableError):
                await c.directory.announce(SPACE, record(3, "wrong", time.time() + 86_400))
            assert texts(await a.directory.find(SPACE)) == ["right"]
            assert texts(await c.directory.find(SPACE)) == ["wrong"]  # it believes its own clock

    run(scenario)


def test_new_nodes_become_known_by_themselves_and_an_end_is_an_end() -> None:
    async def scenario() -> None:
        async with nodes(4) as (a, b, c, d):
            for network in (b, c, d):
                await network.transport.connect(address_of(a))
            # b and d have each only been told of a: the look around at the start does the rest
            await until(lambda: len(d.directory._table) == 3)
            with anyio.fail_after(60):
                await d.directory.announce(SPACE, record(4))
        with pytest.raises(TransportClosedError):
            await d.directory.find(SPACE)

    run(scenario)
