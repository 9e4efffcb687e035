from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Any, cast

import msgspec
import pytest
import trio
from trio.testing import MockClock

from neuroshard.identity import sign_claim
from neuroshard.messages import Frame, MalformedFrameError
from neuroshard.messages.frame import encode_head, unpack
from neuroshard.network import RequestTimeoutError, ScoreReason, Transport
from neuroshard.network.libp2p.address_book import PeerAddressBook
from neuroshard.network.libp2p.directory import (
    FIND_KIND,
    SEARCH_SECONDS,
    STORE_KIND,
    FindAnswer,
    FindRequest,
    FoundNode,
    KademliaDirectory,
    StoreRequest,
)
from neuroshard.network.libp2p.relay import RelayClient
from neuroshard.network.transport import DirectoryRecord
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.network_nodes import run

SPACE = "run/0"
ME = identity_of(1).node_id


class FakeTransport:
    """Answers by a function, and calls what the directory serves."""

    def __init__(self, answer: Callable[[NodeId, Frame], Any]) -> None:
        self.local_id = ME
        self.handlers: dict[str, Any] = {}
        self._answer = answer
        self.asked: list[NodeId] = []

    def addresses(self) -> tuple[str, ...]:
        return ()

    def serve(self, kind: str, handler: Any, *_: Any, **__: Any) -> None:
        self.handlers[kind] = handler

    async def request(self, peer: NodeId, frame: Frame, **_: Any) -> Frame:
        self.asked.append(peer)
        return await self._answer(peer, frame)


def directory_with(
    answer: Callable[[NodeId, Frame], Any],
    contacts: PeerAddressBook,
    host: str = "8.8.4.4",
    *,
    form: type[DirectoryRecord] = DirectoryRecord,
) -> tuple[KademliaDirectory, FakeTransport]:
    transport = FakeTransport(answer)
    directory = KademliaDirectory(
        cast("Transport", transport),
        contacts,
        now=time.time,
        random=Random(1),
        report=lambda *_: None,
        host_of=lambda _: host,
        form=form,
    )
    return directory, transport


async def nobody(peer: NodeId, _: Frame) -> Frame:
    raise RequestTimeoutError(f"{peer} is silent")


def longest_addresses(peer: NodeId) -> list[str]:
    end = f".example/tcp/65535/p2p/{peer}"
    return [f"/dns4/{number}{('.' + 62 * 'a') * 3}"[: 256 - len(end)] + end for number in range(8)]


@pytest.mark.parametrize("address_kind", ["names", "relays"])
def test_an_answer_fits_a_frame_however_long_addresses_are(address_kind: str) -> None:
    async def scenario() -> None:
        contacts = PeerAddressBook(ME, has_neighbours=True)  # which takes names, the longest addresses there are
        directory, transport = directory_with(nobody, contacts)
        relay = identity_of(2).node_id
        for number in range(10, 60):
            peer = identity_of(number).node_id
            relayed = [f"/ip4/203.0.113.1{i}/tcp/45678/p2p/{relay}/p2p-circuit/p2p/{peer}" for i in range(4)]
            honest = [f"/ip4/203.0.113.20{i}/tcp/45678/p2p/{peer}" for i in range(2)] + relayed
            contacts.learn_texts(peer, longest_addresses(peer) if address_kind == "names" else honest)
            assert len(contacts.of(peer)) == (8 if address_kind == "names" else 6)
            directory.meet(peer)
            record = sign_claim(identity_of(number), "announcement", {"text": "x" * 1500}, time.time()).encode()
            await transport.handlers[STORE_KIND](peer, Frame(STORE_KIND, StoreRequest(SPACE, record)))
        question = Frame(FIND_KIND, FindRequest(bytes(32), namespace=SPACE))
        answer = await transport.handlers[FIND_KIND](identity_of(99).node_id, question)
        assert len(encode_head(answer, (), 0)) > 50_000  # and no error
        assert len(answer.read(FindAnswer).nodes) >= (8 if address_kind == "names" else 16)
        assert len(answer.read(FindAnswer).records) >= 12

    run(scenario)


def test_a_relayed_address_that_peers_would_refuse_is_not_announced() -> None:
    contacts = PeerAddressBook(ME, has_neighbours=True)
    relay = identity_of(2).node_id
    short = f"/ip4/203.0.113.1/tcp/4001/p2p/{relay}"
    contacts.learn_texts(relay, [longest_addresses(relay)[0], short])
    client = RelayClient(cast("Any", None), cast("Any", FakeTransport(nobody)), contacts)
    client._places[relay] = 0.0
    assert client.addresses() == (f"{short}/p2p-circuit/p2p/{ME}",)


def test_a_keeper_gives_no_more_records_than_it_is_asked_for() -> None:
    async def scenario() -> None:
        _, transport = directory_with(nobody, PeerAddressBook(ME))
        for number in range(10, 20):
            record = sign_claim(identity_of(number), "announcement", {}, time.time()).encode()
            stored = Frame(STORE_KIND, StoreRequest(SPACE, record))
            await transport.handlers[STORE_KIND](identity_of(number).node_id, stored)
        given = {}
        for most in (0, 3, 64):
            question = Frame(FIND_KIND, FindRequest(bytes(32), namespace=SPACE, most=most))
            answer = await transport.handlers[FIND_KIND](identity_of(99).node_id, question)
            given[most] = len(answer.read(FindAnswer).records)
        assert given == {0: 0, 3: 3, 64: 10}
        for nonsense in (-1, "3", None):
            question = msgspec.msgpack.encode({"key": bytes(32), "namespace": SPACE, "most": nonsense})
            with pytest.raises(MalformedFrameError, match=r"\$\.most"):
                unpack(question, FindRequest)

    run(scenario)


def test_a_record_that_every_keeper_gives_is_checked_once() -> None:
    async def scenario() -> None:
        records = [
            sign_claim(identity_of(number), "announcement", {}, time.time()).encode() for number in range(20, 23)
        ]
        forged = records[0][:-1] + bytes([records[0][-1] ^ 1])
        asked_for: list[Any] = []
        checked: list[NodeId] = []

        async def give(_: NodeId, question: Frame) -> Frame:
            asked_for.append(question.read(FindRequest).most)
            return Frame(FIND_KIND, FindAnswer(records=(*records, forged)))

        class Counted(DirectoryRecord, frozen=True):
            def leads_to(self, node_id: NodeId) -> bool:
                checked.append(node_id)
                return super().leads_to(node_id)

        directory, _ = directory_with(give, PeerAddressBook(ME), form=Counted)
        for number in range(10, 18):
            directory.meet(identity_of(number).node_id)
        assert sorted(await directory.find(SPACE, limit=40)) == sorted(records)
        assert sorted(checked) == sorted(identity_of(number).node_id for number in range(20, 23))
        assert directory.refused[ScoreReason.BAD_SIGNATURE] == 8  # whoever gives a forged one pays for it
        assert asked_for == 8 * [10]

    run(scenario)


def test_an_answer_makes_this_node_dial_few_places_and_none_near_by() -> None:
    async def scenario() -> None:
        contacts = PeerAddressBook(ME)
        teller = identity_of(2).node_id
        victims = [identity_of(number).node_id for number in range(10, 26)]
        hosts = ["127.0.0.1", "192.168.1.1", "10.0.0.1", "8.8.8.8", "8.8.8.9", "8.8.8.10", "8.8.8.11", "8.8.8.12"]

        async def lie(peer: NodeId, _: Frame) -> Frame:
            if peer != teller:
                return await nobody(peer, _)
            nodes = (FoundNode(node, tuple(f"/ip4/{host}/tcp/22/p2p/{node}" for host in hosts)) for node in victims)
            return Frame(FIND_KIND, FindAnswer(tuple(nodes)))

        directory, _ = directory_with(lie, contacts)
        directory.meet(teller)
        await directory.find(SPACE)
        told = [address for node in victims for address in contacts.of(node)]
        assert {address.host for address in told} <= {"8.8.8.8", "8.8.8.9"}
        assert len(told) <= 32

    run(scenario)


def test_a_search_among_liars_and_dead_nodes_ends() -> None:
    async def scenario() -> None:
        random, made = Random(1), iter(range(100, 4000))
        contacts, liar = PeerAddressBook(ME), identity_of(2).node_id

        async def lie(peer: NodeId, _: Frame) -> Frame:
            if peer != liar and random.random() < 0.8:
                await trio.sleep(5)
                return await nobody(peer, _)
            dead = [identity_of(next(made)).node_id for _ in range(8)]
            nodes = (FoundNode(node, (f"/ip4/8.8.8.8/tcp/22/p2p/{node}",)) for node in dead)
            return Frame(FIND_KIND, FindAnswer(tuple(nodes)))

        directory, transport = directory_with(lie, contacts)
        directory.meet(liar)
        began = trio.current_time()
        assert await directory.find(SPACE) == ()
        assert trio.current_time() - began <= SEARCH_SECONDS
        assert len(transport.asked) > 1

    run(scenario, clock=MockClock(autojump_threshold=0))


def test_addresses_in_a_signed_record_are_the_nodes_own_word() -> None:
    async def scenario() -> None:
        contacts, bob = PeerAddressBook(ME), identity_of(3)
        address = f"/ip4/8.8.8.8/tcp/4001/p2p/{bob.node_id}"
        record, *lies = (
            sign_claim(bob, "announcement", {"addresses": addresses}, time.time()).encode()
            for addresses in ([address], [address, f"/ip4/8.8.8.8/tcp/4001/p2p/{ME}"], [address, 5], [address] * 17)
        )

        async def tell(_: NodeId, question: Frame) -> Frame:
            return Frame(FIND_KIND, FindAnswer(records=(record, *lies)))

        directory, _ = directory_with(tell, contacts)
        directory.meet(identity_of(2).node_id)
        assert await directory.find(SPACE) == (record,)
        assert [known.text for known in contacts.vouched(bob.node_id)] == [address]
        assert directory.refused == {ScoreReason.MALFORMED_CLAIM: 3}

    run(scenario)


@pytest.mark.parametrize(("is_author", "believed"), [(True, ["8.8.8.8", "10.0.0.7"]), (False, ["8.8.8.8"])])
def test_private_addresses_in_a_record_count_only_from_its_author_on_a_private_network(
    is_author: bool, believed: list[str]
) -> None:
    """Whoever signs a record may be anywhere: the node that keeps it says nothing about that."""

    async def scenario() -> None:
        contacts, bob = PeerAddressBook(ME), identity_of(3)
        places = [f"/ip4/{host}/tcp/22/p2p/{bob.node_id}" for host in ("8.8.8.8", "10.0.0.7", "169.254.169.254")]
        record = sign_claim(bob, "announcement", {"addresses": places}, time.time()).encode()

        async def tell(_: NodeId, question: Frame) -> Frame:
            return Frame(FIND_KIND, FindAnswer(records=(record,)))

        directory, _ = directory_with(tell, contacts, "10.0.0.2")
        directory.meet(bob.node_id if is_author else identity_of(2).node_id)
        assert await directory.find(SPACE) == (record,)
        assert [known.host for known in contacts.vouched(bob.node_id)] == believed

    run(scenario)
