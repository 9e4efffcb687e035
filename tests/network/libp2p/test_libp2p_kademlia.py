from __future__ import annotations

from collections.abc import Container, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.errors import DataError
from neuroshard.identity import NodeIdentity, sign_claim
from neuroshard.network import ScoreReason
from neuroshard.network.libp2p.kademlia import (
    BUCKET_SIZE,
    MAX_RECORDS_OF_NAMESPACE,
    MAX_RECORDS_OF_NODE,
    PARALLEL,
    REPLICAS,
    Lookup,
    RecordStore,
    RoutingTable,
    StoredRecord,
    closest,
    key_of,
    record_score_reason,
)
from neuroshard.network.transport import MAX_RECORD_BYTES, RECORD_SECONDS
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of

NOW = 1_800_000_000.0


def name(number: int) -> NodeId:
    return NodeId(f"node {number}")


def search(
    tables: Mapping[NodeId, RoutingTable], start: NodeId, key: int, dead: Container[NodeId]
) -> tuple[Lookup, int]:
    """A lookup that `start` makes, and how many it asked; whoever is asked or answers is remembered."""
    lookup, asked = Lookup(key, tables[start].closest(key), start), 0
    while not lookup.is_done:
        under_way: list[NodeId] = []
        while (peer := lookup.next()) is not None:
            under_way.append(peer)
        assert 0 < len(under_way) <= PARALLEL
        for peer in under_way:
            asked += 1
            if peer in dead:
                lookup.failed(peer)
                continue
            lookup.answered(peer, tables[peer].closest(key))
            tables[peer].heard_from(start)
            tables[start].heard_from(peer)
    return lookup, asked


def test_a_lookup_finds_the_nearest_of_many_asking_few() -> None:
    random = Random(3)
    names = [name(number) for number in range(500)]
    tables = {node: RoutingTable(node) for node in names}
    for node in names:  # everybody has met some and then looked around, as the directory does at its start
        for other in random.sample(names, 20):
            tables[node].heard_from(other)
    for node in names:
        search(tables, node, key_of(node), set())
    dead = set(random.sample(names, 50))
    found, asked = 0, 0
    for number in range(40):
        key, start = key_of(f"namespace {number}"), random.choice([n for n in names if n not in dead])
        lookup, questions = search(tables, start, key, dead)
        asked += questions
        truth = closest([n for n in names if n not in dead and n != start], key, REPLICAS)
        found += len(set(lookup.nearest()) & set(truth))
    assert found / (40 * REPLICAS) > 0.95
    assert asked / 40 < 30


def test_a_lookup_that_knows_nobody_or_hears_only_lies_ends() -> None:
    assert Lookup(1, [], name(0)).is_done
    lookup = Lookup(1, [name(1), name(2)], name(0))
    for peer in (lookup.next(), lookup.next()):
        assert peer is not None
        lookup.failed(peer)
    assert lookup.is_done
    assert lookup.nearest() == []
    liar = Lookup(1, [name(1)], name(0))
    told = 0
    while not liar.is_done:
        peer = liar.next()
        assert peer is not None
        told += 1
        if told == 1:
            liar.answered(peer, [name(10 + number) for number in range(10_000)])
        else:
            liar.failed(peer)
    assert told <= 1 + BUCKET_SIZE


@given(st.lists(st.integers(0, 300), max_size=300))
def test_a_routing_table_is_bounded_and_never_holds_its_owner(numbers: list[int]) -> None:
    table = RoutingTable(name(0))
    for number in numbers:
        table.heard_from(name(number))
    assert len(table) <= len(set(numbers) - {0})
    nearest = table.closest(key_of("x"), 1000)
    assert name(0) not in nearest
    assert nearest == sorted(nearest, key=lambda peer: key_of(peer) ^ key_of("x"))
    for peer in nearest:
        table.failed(peer)
    assert len(table) == 0


def test_a_full_bucket_keeps_whom_it_knows() -> None:
    table = RoutingTable(name(0))
    for number in range(1, 2000):
        table.heard_from(name(number))
    known = set(table.closest(0, 1000))
    assert len(known) < 200
    for number in range(2000, 4000):
        table.heard_from(name(number))
    assert known <= set(table.closest(0, 1000))


def record(node: NodeIdentity, at: float = NOW, text: str = "") -> bytes:
    return sign_claim(node, "announcement", {"text": text}, at).encode()


def checked(node: NodeIdentity, at: float = NOW, text: str = "") -> StoredRecord:
    return StoredRecord.checked(record(node, at, text), max(NOW, at))


def test_the_newest_record_of_a_node_stays() -> None:
    store, node = RecordStore(), identity_of(1)
    for at, text in ((NOW, "second"), (NOW - 10, "first"), (NOW + 10, "third"), (NOW + 5, "late")):
        assert store.put("run/0", checked(node, at, text))
    (kept,) = store.get("run/0", NOW + 10, Random(1))
    assert b"third" in kept.data
    assert len(store) == 1
    assert store.get("run/1", NOW, Random(1)) == []
    assert store.get("run/0", NOW + RECORD_SECONDS + 11, Random(1)) == []
    store.expire(NOW + RECORD_SECONDS + 11)
    assert len(store) == 0


def test_a_store_is_bounded() -> None:
    store = RecordStore()
    node = checked(identity_of(1))
    assert [store.put(f"run/{number}", node) for number in range(MAX_RECORDS_OF_NODE + 1)][-2:] == [True, False]
    for number in range(MAX_RECORDS_OF_NAMESPACE + 10):
        store.put("full", StoredRecord(name(number), NOW + number, b""))
    kept = store.get("full", NOW, Random(1))
    assert len(kept) == MAX_RECORDS_OF_NAMESPACE
    assert min(entry.issued_at for entry in kept) == NOW + 10  # the oldest made room


def test_a_full_store_has_room_for_who_comes_new_and_the_greediest_pays() -> None:
    store = RecordStore(200 * StoredRecord(name(0), NOW, b"").byte_count)
    for number in range(100):  # two addresses with many identities in many namespaces
        for space in range(20):
            store.put(f"run/{space}", StoredRecord(name(1000 + number), NOW, b""), f"192.0.2.{number % 2}")
    assert len(store) == 200
    for number in range(60):
        assert store.put("run/0", StoredRecord(name(number), NOW, b""), f"198.51.100.{number}")
    assert len(store) == 200
    kept = {record.node_id for record in store.get("run/0", NOW, Random(1))}
    assert kept >= {name(number) for number in range(60)}


def test_records_take_no_more_memory_than_they_may_and_the_largest_heap_pays() -> None:
    most = 1_000_000
    store = RecordStore(most)
    for number in range(50):
        store.put(
            "run/0", StoredRecord(name(number), NOW, bytes(1500), ("/ip4/198.51.100.1/tcp/1",)), f"198.51.100.{number}"
        )
    long = tuple("x" * 256 for _ in range(16))
    for number in range(200):  # as large as a record may be
        store.put(
            f"run/{number % 10}", StoredRecord(name(1000 + number), NOW, bytes(MAX_RECORD_BYTES), long), "192.0.2.1"
        )
        kept = [record for space in range(10) for record in store.get(f"run/{space}", NOW, Random(1))]
        assert sum(record.byte_count for record in kept) <= most
        assert len(store) == len(kept)
    names = {record.node_id for record in store.get("run/0", NOW, Random(1))}
    assert names >= {name(number) for number in range(50)}
    store.expire(NOW + RECORD_SECONDS + 1)
    assert (len(store), store._bytes.total()) == (0, 0)


def test_one_record_always_finds_room() -> None:
    store = RecordStore(1)
    for number in range(3):
        assert store.put("run/0", StoredRecord(name(number), NOW, bytes(1500)))
        assert len(store) == 1


def test_a_full_namespace_keeps_those_who_share_their_address_with_few() -> None:
    store = RecordStore()
    for number in range(20):
        store.put("full", StoredRecord(name(number), NOW, b""), f"198.51.100.{number}")
    for number in range(20, MAX_RECORDS_OF_NAMESPACE + 500):
        store.put("full", StoredRecord(name(number), NOW + number, b""), "192.0.2.1")
    kept = {record.node_id for record in store.get("full", NOW, Random(1))}
    assert len(kept) == MAX_RECORDS_OF_NAMESPACE
    assert kept >= {name(number) for number in range(20)}


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (b"{}", ScoreReason.MALFORMED_CLAIM),
        (b"\xff" * 100, ScoreReason.MALFORMED_CLAIM),
        (b"[" * 10_000, ScoreReason.MALFORMED_CLAIM),
        (bytes(MAX_RECORD_BYTES + 1), ScoreReason.OVERSIZED),
        (sign_claim(identity_of(1), "report", {}, NOW).encode(), ScoreReason.BAD_SIGNATURE),
        (record(identity_of(2)), ScoreReason.BAD_RECORD),  # another's
        (record(identity_of(1)).replace(b"\xa4text", b"\xa4tent"), ScoreReason.BAD_SIGNATURE),
        (record(identity_of(1), NOW - RECORD_SECONDS - 1), ScoreReason.EXPIRED_CLAIM),
        (record(identity_of(1), NOW + 86_400), ScoreReason.EXPIRED_CLAIM),
        (record(identity_of(1, NOW - 10 * 86_400)), ScoreReason.EXPIRED_CLAIM),  # its delegation has run out
    ],
)
def test_false_records_are_refused_for_what_they_are(lie: bytes, reason: ScoreReason) -> None:
    with pytest.raises(DataError) as refused:
        StoredRecord.checked(lie, NOW, identity_of(1).node_id)
    assert record_score_reason(refused.value) is reason
