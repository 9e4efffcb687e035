"""Names that cost nothing against honest replicas: they lead nobody astray, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio
import pytest
from msgspec import structs

from neuroshard.consensus.chain import ChainProof
from neuroshard.consensus.committee import Committee, Seat
from neuroshard.consensus.effects import Effect, Say
from neuroshard.consensus.round_messages import IntentSaid, Phase, Quorum, Vote
from neuroshard.network import InMemoryNetwork
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.types import NodeId
from tests.worlds.free_names import FreeName, invented
from tests.worlds.replicas import DUE_SECONDS, EVERYBODY, SimulatedReplica, for_seconds, play
from tests.worlds.rounds import Liar

BY_ID = sorted(EVERYBODY)
SEATS = tuple(BY_ID[-4:])  # every liar sorts before them


def voters(network: InMemoryNetwork, *, is_open: bool) -> list[SimulatedReplica]:
    return [SimulatedReplica(name, network, seed, seats=SEATS, is_open=is_open) for seed, name in enumerate(SEATS)]


def free(count: int, first: int = 0) -> list[NodeId]:
    return [NodeId(f"12D3KooWA free name {number:03d}") for number in range(first, first + count)]


def proof_of(replica: SimulatedReplica) -> ChainProof:
    chain = replica.group.chain.chain
    assert chain is not None
    return chain.proof(0)


def with_own_committee(proof: ChainProof, liar: SimulatedReplica) -> ChainProof:
    """A change of the committee that only its new seat has signed, and a value of that committee."""
    assert proof.tip is not None
    own = Committee.founded([Seat(liar.member.wallet_id, liar.name, 0)], is_open=False)
    ledger = structs.replace(proof.ledger, committee=own)
    value = structs.replace(proof.tip.value, height=10**6, next_committee=own, next_root="e" * 64, ledger=ledger.digest)
    vote = liar.signed(Vote(value.step_id, 0, Phase.COMMIT, value.digest))
    change = Quorum(value, 0, Phase.COMMIT, (vote,))
    return ChainProof(ledger, change, (change,))


def with_fewer_votes(proof: ChainProof) -> ChainProof:
    assert proof.tip is not None
    return structs.replace(proof, tip=structs.replace(proof.tip, votes=proof.tip.votes[:1]))


def with_a_gap(proof: ChainProof) -> ChainProof:
    """The newest value twice as high as it is, with values missing before it."""
    assert proof.tip is not None
    value = structs.replace(proof.tip.value, height=2 * proof.tip.value.height)
    return structs.replace(proof, tip=structs.replace(proof.tip, value=value), recent=proof.recent[::2])


def check_one_line(replicas: Sequence[SimulatedReplica]) -> None:
    """Every outer step has ended with the same bytes for all, and nobody is left behind."""
    steps = [one.state.outer_step for one in replicas]
    assert max(steps) - min(steps) <= 1
    for step in range(1, max(steps) + 1):
        assert len({one.anchors[step] for one in replicas if step in one.anchors}) <= 1
    assert [one.group.chain.fork for one in replicas] == [None] * len(replicas)


@pytest.mark.parametrize("is_open", [False, True])
def test_nobody_follows_standings_that_free_names_invent(is_open: bool) -> None:
    """A seat slept through some steps. The liars report more steps than anybody and answer each in another way."""

    async def scenario(network: InMemoryNetwork) -> None:
        seats = voters(network, is_open=is_open)
        *awake, sleeper = seats
        network.suspend(sleeper.name)
        await for_seconds(DUE_SECONDS + 10, *awake)
        stale = proof_of(awake[0])
        await for_seconds(4 * DUE_SECONDS, *awake)
        certified = awake[0].state.outer_step
        assert certified >= 3
        liar = SimulatedReplica(BY_ID[0], InMemoryNetwork(), 9)

        def status() -> ReplicaStatus:
            steps = 10**9
            return ReplicaStatus(True, steps, steps, "e" * 64, is_certified=True, height=10**12, wallet_rounds=10**9)

        lies: Sequence[Callable[[], ChainProof | bytes | None]] = (
            lambda: ChainProof(stale.ledger, None),
            lambda: stale,
            lambda: invented(proof_of(awake[0])),
            lambda: with_own_committee(proof_of(awake[0]), liar),
            lambda: with_fewer_votes(proof_of(awake[0])),
            lambda: with_a_gap(proof_of(awake[0])),
            lambda: b"no proof at all",
            lambda: None,
        )
        for name, lie in zip(free(len(lies)), lies, strict=True):
            FreeName(name, network, status, lie)
        network.wake(sleeper.name)
        follows = 0

        async def follow() -> None:
            """As the node of the sleeper downloads the state of an honest one."""
            nonlocal follows
            await sleeper.group.must_follow.wait()
            sleeper.follow(awake[0])
            follows += 1

        async with anyio.create_task_group() as tasks:
            for replica in seats:
                tasks.start_soon(replica.live)
            tasks.start_soon(follow)
            with anyio.fail_after(120):
                while sleeper.state.outer_step < certified:
                    await anyio.sleep(1)
            await anyio.sleep(3 * DUE_SECONDS)
            tasks.cancel_scope.cancel()
        assert follows <= 1
        check_one_line(seats)
        assert sleeper.state.outer_step >= certified + 2
        assert not any(one.group.must_follow.is_set() for one in awake)

    play(scenario)


def announces_only(_one: Liar, effect: Effect) -> list[Effect]:
    """It promises a contribution and sends nothing else."""
    return [effect] if not isinstance(effect, Say) or isinstance(effect.message, IntentSaid) else []


def seconds_per_step(seats: int, *, with_names: bool) -> float:
    """Of an open run, with or without names that cost nothing."""
    found = list[float]()

    async def scenario(network: InMemoryNetwork) -> None:
        names = SEATS[:seats]
        honest = [SimulatedReplica(name, network, seed, seats=names, is_open=True) for seed, name in enumerate(names)]
        for one in honest:
            one.may_be_alone = True
        began = anyio.current_time()

        def same() -> ReplicaStatus:
            return replace(honest[0].replica_status(), sequences=10**6)

        def now_and_then() -> ReplicaStatus | None:
            """Often enough to count as here, and silent when it matters."""
            return same() if anyio.current_time() % 25 < 2 else None

        def of_another_state() -> ReplicaStatus:
            return replace(same(), root=f"{int(1000 * anyio.current_time()):064x}", height=10**9)

        promising = list[SimulatedReplica]()
        if with_names:
            for number, name in enumerate(free(290)):
                FreeName(name, network, (same, now_and_then, of_another_state)[number % 3])
            for number in range(6):
                liar = SimulatedReplica(BY_ID[number], network, 50 + number, seats=names, is_open=True)
                liar.lie = announces_only
                promising.append(liar)
            honest[0].takers = frozenset(free(3, first=400))
        async with anyio.create_task_group() as tasks:
            for replica in (*honest, *promising):
                tasks.start_soon(replica.live)
            with anyio.fail_after(2000):
                while honest[-1].state.outer_step < 5:
                    await anyio.sleep(0.1)
            found.append((anyio.current_time() - began) / 5)
            tasks.cancel_scope.cancel()
        check_one_line(honest)
        chain = honest[0].group.chain.chain
        assert chain is not None
        for certificate in chain.recent:
            value = certificate.value
            assert {member.node_id for member in certificate.signers} <= set(names)
            assert set(value.accepted) <= set(names)
            assert value.next_committee is None

    play(scenario)
    return found[0]


@pytest.mark.parametrize("seats", [4, 1])
def test_a_round_takes_hardly_longer_with_three_hundred_names_around_it(seats: int) -> None:
    """They answer and stay silent, are silent now and then, show other states, or announce a contribution in vain."""
    alone = seconds_per_step(seats, with_names=False)
    assert seconds_per_step(seats, with_names=True) <= 1.5 * alone


@pytest.mark.parametrize("seats", [4, 1])
def test_a_stranger_that_works_takes_part_between_silent_names_and_counts_after_a_while(seats: int) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        names = SEATS[:seats]
        honest = [SimulatedReplica(name, network, seed, seats=names, is_open=True) for seed, name in enumerate(names)]
        for one in honest:
            one.may_be_alone = True
        stranger = SimulatedReplica(BY_ID[0], network, 9, seats=names, is_open=True)
        for name in free(8):
            FreeName(name, network, lambda: replace(honest[0].replica_status(), sequences=10**6))
        for seconds, counts in ((5 * DUE_SECONDS, False), (8 * DUE_SECONDS, True)):
            await for_seconds(seconds, stranger, *honest)
            check_one_line([stranger, *honest])
            chain = honest[0].group.chain.chain
            assert chain is not None
            assert sum(stranger.name in each.value.accepted for each in chain.recent) >= 2
            assert chain.ledger.counts(stranger.name) is counts
            assert set(chain.ledger.committee.members) == {one.member for one in honest}

    play(scenario)
