"""Reducers that return false slices, by malice or bad memory: the parts decide, and who says otherwise is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from neuroshard.aggregation import SliceRows, TrimmedMean, WeightedSum, reduce_slice
from neuroshard.compression import EXCERPT, Bf16Codec, Codec, Fp32Codec, Int4Codec, Int8Codec
from neuroshard.consensus.all_reduce import ANSWER_SECONDS
from neuroshard.consensus.effects import CompareBlocks, Effect, Say
from neuroshard.consensus.round_messages import (
    BlocksSent,
    BlocksWanted,
    ContributionSent,
    MalformedMessageError,
    PartsWanted,
    ResultSaid,
    StatementSaid,
    StatisticsDigests,
    Value,
    encode_round_message,
    read_round_message,
)
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.slices import AUDITED_BLOCKS, SlicePlan, assign, digest_of, draw, draw_blocks
from neuroshard.types import NodeId
from tests.worlds.rounds import TIMING, Liar, Twist, World

CODECS: list[Codec] = [Int4Codec(), Int8Codec(), Bf16Codec(), Fp32Codec()]
SEVEN, EIGHT = [NodeId(name) for name in "abcdefg"], [NodeId(name) for name in "abcdefgh"]


def value_at(world: World, node: str) -> Value:
    (_, complete), *_ = world.nodes[NodeId(node)].ended.values()
    return complete.certificate.value


def truth_of(world: World, value: Value) -> tuple[str, ...]:
    """The digests of the aggregate as every honest reducer computes it."""
    nodes = [world.nodes[member.node_id] for member in value.members]

    def reduced(index: int) -> bytes:
        parts = [world.part(one.member.node_id, 0, one.attempts, index) for one in nodes]
        return b"r" + sha256(b"".join(parts)).digest()

    return tuple(digest_of(reduced(index)).hex() for index in range(world.plan.count))


def colluders(world: World) -> frozenset[NodeId]:
    """The reducers of the first slice in the first step."""
    one = next(iter(world.nodes.values()))
    return frozenset(draw(world.plan, list(world.nodes), one.chain.ledger.seed, 2)[0])


def lies_about_first_slice(liars: Iterable[NodeId], *, of_statistics: bool = False) -> dict[NodeId, Twist]:
    """Liars that agree on false bytes of the first slice, which they reduce, and are honest otherwise."""

    def lie(one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, ResultSaid(signed, slices)) if not of_statistics and 0 in dict(signed.body.digests):
                false = b"lie" + sha256(b"lie").digest()
                digests = tuple((i, digest_of(false).hex() if i == 0 else d) for i, d in signed.body.digests)
                said = one.signed(structs.replace(signed.body, digests=digests))
                return [Say(to, ResultSaid(said, {i: false if i == 0 else made for i, made in slices.items()}))]
            case Say(to, StatementSaid(signed, statistics)) if of_statistics and 0 in statistics:
                lies = {i: b"lie" if i == 0 else made for i, made in statistics.items()}
                digests = tuple((i, digest_of(made).hex()) for i, made in sorted(lies.items()))
                return [Say(to, StatementSaid(one.signed(StatisticsDigests(signed.body.round_id, digests)), lies))]
            case _:
                return [effect]

    return dict.fromkeys(liars, lie)


@pytest.mark.parametrize("names", [SEVEN, EIGHT])
@pytest.mark.parametrize("seed", range(4))
def test_two_reducers_that_lie_together_about_the_only_slice_convince_nobody(names: list[NodeId], seed: int) -> None:
    world = World(names, seed=seed, is_open=True, plan=SlicePlan(4096))
    liars = colluders(world)
    world.twist = lies_about_first_slice(liars)
    honest = [name for name in names if name not in liars]
    world.start_all()
    assert world.settle(until=lambda: all(world.nodes[name].done for name in honest))
    world.check_safety(liars)
    accused = [one for name in honest for one in world.nodes[name].accused]
    assert {one.node for one in accused} == liars
    assert all("does not follow from the parts" in one.what and one.proof for one in accused)
    for name in honest:
        value = value_at(world, name)
        assert value.aggregate == truth_of(world, value)


def test_seats_find_two_lying_reducers_by_secret_checks() -> None:
    """Of eight slices, each honest seat checks one: most steps show the lie, and an honest reducer is never accused."""
    found = 0
    for seed in range(20):
        world = World(SEVEN, seed=seed, is_open=True, plan=SlicePlan(8 * 4096))
        liars = colluders(world)
        world.twist = lies_about_first_slice(liars)
        world.start_all()
        assert world.settle(
            until=lambda world=world, liars=liars: all(
                one.done for name, one in world.nodes.items() if name not in liars
            )
        )
        world.check_safety(liars)
        accused = {one.node for name in SEVEN if name not in liars for one in world.nodes[name].accused}
        assert accused <= liars
        found += bool(accused)
    assert found >= 10


@pytest.mark.parametrize("seed", range(3))
def test_false_statistics_of_two_reducers_end_the_view_and_not_the_step(seed: int) -> None:
    world = World(SEVEN, seed=seed, is_open=True, plan=SlicePlan(4096))
    liars = colluders(world)
    world.twist = lies_about_first_slice(liars, of_statistics=True)
    honest = [name for name in SEVEN if name not in liars]
    world.start_all()
    assert world.settle(until=lambda: all(world.nodes[name].done for name in honest))
    world.check_safety(liars)
    for name in honest:
        value = value_at(world, name)
        assert not liars & {member.node_id for member in value.members}
        assert value.aggregate == truth_of(world, value)
        false = digest_of(b"lie").hex().encode()
        assert all(false in one.proof[0] for one in world.nodes[name].accused if one.node in liars)


def test_a_seat_that_contradicts_an_honest_reducer_is_accused_itself() -> None:
    """Framing: the liar signs another result for a slice that it does not reduce."""

    def frames(one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, ResultSaid(signed)):
                digests = tuple((index, sha256(b"no").hexdigest()) for index in range(3))
                return [effect, Say(to, ResultSaid(one.signed(structs.replace(signed.body, digests=digests)), {}))]
            case _:
                return [effect]

    for is_open in (True, False):
        world = World("abcd", seed=2, is_open=is_open)
        world.twist = {NodeId("d"): frames}
        world.start_all()
        assert world.settle(until=lambda world=world: all(world.nodes[NodeId(name)].done for name in "abc"))
        for name in "abc":
            value = value_at(world, name)
            assert value.aggregate == truth_of(world, value)
            assert {one.node for one in world.nodes[NodeId(name)].accused} <= {"d"}
            assert all(one.is_malice is is_open for one in world.nodes[NodeId(name)].accused)
        assert any(world.nodes[NodeId(name)].accused for name in "abc")
        assert world.now < TIMING.redo_seconds


def silent(_one: Liar, effect: Effect) -> list[Effect]:
    """A reducer that takes part and computes nothing."""
    is_work = isinstance(effect, Say) and isinstance(effect.message, StatementSaid | ResultSaid | PartsWanted)
    return [] if is_work else [effect]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_reducer_that_is_silent_in_every_view_does_not_stop_the_step(is_open: bool) -> None:
    """The others compute its slices from the parts when half of the view is over."""
    world = World("abcd", seed=1, is_open=is_open)
    world.twist = {NodeId("b"): silent}
    world.start_all()
    assert world.settle(until=lambda: all(world.nodes[NodeId(name)].done for name in "acd"))
    assert world.now <= TIMING.redo_seconds + 1
    value = value_at(world, "a")
    assert len(value.members) == 4
    assert value.aggregate == truth_of(world, value)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("names", ["abcd", "abcdefgh"])
def test_a_silent_reducer_costs_each_member_about_one_contribution(names: str, is_open: bool) -> None:
    """Without its statistics nobody has a verdict, so no reducer has a result: only the slices of one are late."""
    slices = 64
    world, healthy = (World(names, seed=2, is_open=is_open, plan=SlicePlan(slices * 4096)) for _ in range(2))
    world.twist = {NodeId("b"): silent}
    for one in (world, healthy):
        one.start_all()
        assert one.settle(until=lambda one=one: all(one.nodes[NodeId(name)].done for name in names if name != "b"))
    assert world.now <= TIMING.redo_seconds + 1
    for name in names:
        assert world.sent[NodeId(name)] - healthy.sent[NodeId(name)] <= 1.25 * slices


def friends(codec: Codec, seed: int, names: str = "abc") -> World:
    return World(names, seed=seed, work=RoundWork(SlicePlan(16 * 4096), codec, TrimmedMean(0.1)))


def breaks(codec: Codec, *, every: int = 1, only: int | None = None) -> Callable[[int, bytes], bytes]:
    """Other codes in every block of this number of blocks, or in one number of one slice."""
    code_bytes = {"int8": 4096, "int4": 2048, "bf16": 8192, "fp32": 16384}[codec.name]
    head, width = codec.encoded_size(4096) - code_bytes, code_bytes // 64

    def broken(index: int, made: bytes) -> bytes:
        data = bytearray(made)
        for block in range(64) if only is None else ():
            if (64 * index + block) % every == 0:
                for place in range(head + block * width, head + (block + 1) * width):
                    data[place] = (data[place] + 1) % 7
        if index == only:
            data[head] = (data[head] + 1) % 7
        return bytes(data)

    return broken


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_friends_find_a_reducer_with_bad_memory_and_end_the_step_with_the_truth(codec: Codec) -> None:
    world, healthy = friends(codec, 1), friends(codec, 1)
    world.broken[NodeId("b")] = breaks(codec)
    for one in (world, healthy):
        one.start_all()
        assert one.settle()
    assert world.now < TIMING.redo_seconds
    assert value_at(world, "a").aggregate == value_at(healthy, "a").aggregate
    assert value_at(world, "b") == value_at(world, "a")
    for name in "ac":
        accused = world.nodes[NodeId(name)].accused
        assert {one.node for one in accused} == {"b"}
        assert not any(one.is_malice for one in accused)  # bad memory is shown, and costs no reputation


def test_healthy_friends_accuse_nobody_and_send_little() -> None:
    for codec in CODECS:
        world = friends(codec, 3)
        sent = 0

        def count(_one: Liar, effect: Effect) -> list[Effect]:
            nonlocal sent
            match effect:
                case Say(to, BlocksSent(content=content)):
                    sent = max(sent, len(content) * len(to))
                case Say(message=PartsWanted()):
                    raise AssertionError
                case _:
                    pass
            return [effect]

        world.twist = dict.fromkeys(world.nodes, count)
        world.start_all()
        assert world.settle()
        assert world.now == 0
        assert not any(one.accused for one in world.nodes.values())
        assert 0 < sent <= AUDITED_BLOCKS * codec.encoded_size(EXCERPT)


@pytest.mark.parametrize(("every", "only", "least", "most"), [(100, None, 5, 5), (1, 12, 0, 2)])
def test_an_error_in_one_block_of_a_hundred_is_found_and_one_flipped_number_is_not(
    every: int, only: int | None, least: int, most: int
) -> None:
    """Each of two seats compares 256 of 683 blocks that others reduce."""
    found = 0
    for seed in range(5):
        world = friends(Int4Codec(), seed)
        world.broken[NodeId("b")] = breaks(Int4Codec(), every=every, only=only)
        world.start_all()
        assert world.settle()
        found += any(world.nodes[NodeId(name)].accused for name in "ac")
    assert least <= found <= most


def test_a_contributor_with_false_blocks_makes_nobody_doubt_an_honest_reducer() -> None:
    def lies(_one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, BlocksSent(round_id, content)):
                return [Say(to, BlocksSent(round_id, content[:-1] + bytes([content[-1] ^ 1])))]
            case _:
                return [effect]

    world, healthy = friends(Int8Codec(), 4), friends(Int8Codec(), 4)
    world.twist = {NodeId("c"): lies}
    for one in (world, healthy):
        one.start_all()
        assert one.settle()
    assert world.now < ANSWER_SECONDS
    assert value_at(world, "a").aggregate == value_at(healthy, "a").aggregate
    assert not any(one.accused for one in world.nodes.values())


def test_an_audit_begins_while_large_results_are_under_way_and_compares_when_they_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("neuroshard.consensus.slices.MESSAGE_BYTES", 1)
    world, done = friends(Int8Codec(), 7), list[Effect]()

    def note(_one: Liar, effect: Effect) -> list[Effect]:
        done.append(effect)
        return [effect]

    def deliver(*, with_results: bool) -> None:
        while places := [
            place
            for place, envelope in enumerate(world.pending)
            if with_results or not (isinstance(envelope.message, ResultSaid) and envelope.message.slices)
        ]:
            world.deliver(places[0])

    world.twist = {NodeId("a"): note}
    world.start_all()
    (machine,) = world.nodes[NodeId("a")].machines.values()
    deliver(with_results=False)
    asked = [effect.message for effect in done if isinstance(effect, Say) and isinstance(effect.message, BlocksWanted)]
    assert len(asked) == 1
    world.advance(ANSWER_SECONDS + 2)  # the blocks have come: nothing is skipped
    assert not any(isinstance(effect, CompareBlocks) for effect in done)
    deliver(with_results=True)
    assert world.all_done(1)
    assert sum(isinstance(effect, CompareBlocks) for effect in done) == 1
    assert machine.progress.skipped_audits == 0


@pytest.mark.parametrize("is_open", [True, False])
def test_a_member_that_reduces_a_slice_gets_no_result_of_it(*, is_open: bool) -> None:
    world, sent = World("abcd", is_open=is_open, plan=SlicePlan(16 * 4096)), list[tuple[NodeId, int]]()
    seed = world.nodes[NodeId("a")].chain.ledger.seed
    upload = dict.fromkeys(world.nodes, 1000)
    reducers = draw(world.plan, upload, seed, 2) if is_open else assign(world.plan, upload, seed)

    def note(_one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, ResultSaid(slices=slices)):
                sent.extend((node, index) for node in to for index in slices)
            case _:
                pass
        return [effect]

    world.twist = dict.fromkeys(world.nodes, note)
    world.start_all()
    assert world.settle()
    assert world.now == 0
    assert sorted(sent) == sorted(
        (node, index) for index, some in enumerate(reducers) for node in world.nodes if node not in some
    )


@pytest.mark.parametrize("answer", [None, b"", b"x" * 100])
def test_an_audit_without_an_answer_is_skipped_and_counted(answer: bytes | None) -> None:
    def lies(_one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, BlocksSent(round_id)):
                return [] if answer is None else [Say(to, BlocksSent(round_id, answer))]
            case _:
                return [effect]

    world = friends(Int4Codec(), 5)
    world.twist = {NodeId("c"): lies}
    world.start_all()
    machines = [machine for name in "ab" for machine in world.nodes[NodeId(name)].machines.values()]
    assert world.settle()
    assert world.now <= (ANSWER_SECONDS + 2 if answer is None else 0)
    assert [machine.progress.skipped_audits for machine in machines] == [1, 1]
    assert not any(one.accused for one in world.nodes.values())


def test_a_flood_of_requests_gets_each_part_twice_and_the_blocks_once() -> None:
    asked = 50
    given = {ContributionSent: 0, BlocksSent: 0}

    def floods(one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, ResultSaid(signed)):
                round_id, slices = signed.body.round_id, tuple(range(16))
                parts = [Say(frozenset({node}), PartsWanted(round_id, node, slices)) for node in to]
                return [effect, *(asked * [Say(to, BlocksWanted(round_id, ((0, 0),))), *parts])]
            case _:
                return [effect]

    def counts(_one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, ContributionSent() | BlocksSent() as message) if to == {"d"}:
                given[type(message)] += len(message.slices) if isinstance(message, ContributionSent) else 1
            case _:
                pass
        return [effect]

    world = friends(Int4Codec(), 6, "abcd")
    world.twist = {**dict.fromkeys(world.nodes, counts), NodeId("d"): floods}
    world.start_all()
    assert world.settle()
    assert world.now == 0
    assert given[BlocksSent] <= 3
    own_share = 16 // 4 + 1
    assert given[ContributionSent] <= 3 * (own_share + 2 * 2)


def test_an_answer_larger_than_the_blocks_of_an_audit_is_not_read() -> None:
    content = bytes(AUDITED_BLOCKS * 4 * EXCERPT + 1)
    with pytest.raises(MalformedMessageError, match="content"):
        read_round_message(encode_round_message(BlocksSent("0" * 64, content)))
    assert read_round_message(encode_round_message(BlocksSent("0" * 64, content[1:])))


@given(st.integers(1, 10**7), st.binary(min_size=1, max_size=8))
def test_blocks_are_drawn_inside_the_slices(length: int, secret: bytes) -> None:
    plan = SlicePlan(length)
    slices = list(range(0, plan.count, 2))
    drawn = draw_blocks(plan, slices, secret)
    assert len(drawn) <= AUDITED_BLOCKS
    assert set(drawn) == set(draw_blocks(plan, slices, secret))
    for index, number in drawn:
        assert index in slices
        assert 0 <= number * EXCERPT <= plan.size(index) - EXCERPT


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_excerpts_are_what_the_whole_vector_says(codec: Codec) -> None:
    numbers = torch.randn(3 * 4096 + 200, generator=torch.Generator().manual_seed(1))
    numbers[4096:8192] = 0
    data, length = codec.encode(numbers), len(numbers)
    decoded = codec.decode(data, length)
    starts = range(0, length - EXCERPT + 1, EXCERPT)
    excerpts = b"".join(codec.excerpt(data, start, length) for start in starts)
    assert len(excerpts) == len(starts) * codec.encoded_size(EXCERPT)
    whole = decoded[: len(starts) * EXCERPT].view(-1, EXCERPT)
    assert torch.equal(codec.decode_excerpts(excerpts), whole)
    assert torch.equal(codec.rounded_like(excerpts, numbers[: whole.numel()].view(-1, EXCERPT)), whole)


def test_compared_blocks_are_those_of_the_whole_reduction() -> None:
    work = RoundWork(SlicePlan(4 * 4096), Int8Codec(), TrimmedMean(0.1))
    vectors = [torch.randn(4 * 4096, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    parts = [work.encoded(vector) for vector in vectors]
    reduction = WeightedSum((0, 2), (0.25, 0.75), 1.0)

    def reduced(index: int) -> bytes:
        rows: list[Tensor] = [work.codec.decode(one[index], 4096) for one in parts]
        return work.results.encode(reduce_slice(SliceRows.of(torch.stack(rows)), reduction))

    aggregate = [reduced(index) for index in range(4)]
    blocks = tuple((index, number) for index in range(4) for number in range(64))
    rows = {row: work.excerpts(parts[row], blocks) for row in (0, 2)}
    assert work.compared(CompareBlocks("0" * 64, blocks, rows, aggregate, reduction)) == frozenset()
    wrong = bytearray(aggregate[2])
    wrong[500] ^= 1
    aggregate[2] = bytes(wrong)
    assert work.compared(CompareBlocks("0" * 64, blocks, rows, aggregate, reduction)) == {2}
    short = {**rows, 2: rows[2][:-1]}
    assert work.compared(CompareBlocks("0" * 64, blocks, short, aggregate, reduction)) is None
