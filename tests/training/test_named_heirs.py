"""The only seat of a stage names the wallet that keeps the copy of its state, which completes steps when it is gone."""

from __future__ import annotations

from dataclasses import replace

from neuroshard.consensus.committee import Committee, NameHeir, Seat
from neuroshard.consensus.foundation import Founding, HeirNaming, StageStart
from neuroshard.consensus.stage_chain import InMemoryChainStore
from neuroshard.network import InMemoryNetwork
from neuroshard.types import NodeId, WalletId
from tests.worlds.replicas import DUE_SECONDS, A, B, C, SimulatedReplica, for_seconds, founding_of, play, wallet_of


def heir_of(replica: SimulatedReplica) -> WalletId | None:
    """The heir that the newest ledger names."""
    chain = replica.group.chain.chain
    assert chain is not None
    return None if chain.ledger.heir is None else chain.ledger.heir.wallet_id


def namings(replica: SimulatedReplica) -> list[int]:
    """The heights whose values name an heir."""
    chain = replica.group.chain.chain
    assert chain is not None
    values = [certificate.value for certificate in chain.recent]
    return [value.height for value in values if any(isinstance(entry, NameHeir) for entry in value.entries)]


def test_the_only_seat_names_the_keeper_once_and_the_next_keeper_again() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        replica = SimulatedReplica(A, network, 0, may_be_alone=True, seats=(A,))
        await for_seconds(1.5 * DUE_SECONDS, replica)
        assert heir_of(replica) is None
        replica.copy_keeper = B
        await for_seconds(3 * DUE_SECONDS, replica)
        assert heir_of(replica) == wallet_of(B)
        assert len(namings(replica)) == 1
        replica.copy_keeper = C
        await for_seconds(2 * DUE_SECONDS, replica)
        assert heir_of(replica) == wallet_of(C)
        assert len(namings(replica)) == 2

    play(scenario)


def test_a_seat_among_others_names_nobody() -> None:
    """The first of two seats decides alone while the other one is away."""

    async def scenario(network: InMemoryNetwork) -> None:
        replica = SimulatedReplica(A, network, 0, may_be_alone=True, seats=(A, B), copy_keeper=C)
        await for_seconds(8 * DUE_SECONDS, replica)
        assert replica.state.outer_step > 0
        assert heir_of(replica) is None

    play(scenario)


def inherited(base: Founding, replica: SimulatedReplica, heir: NodeId = B) -> Founding:
    """The foundation in which an heir continues from the state and the chain of a replica."""
    chain, own = replica.group.chain.chain, replica.replica_status()
    assert chain is not None
    assert chain.ledger.heir is not None
    committee = Committee.founded([Seat(wallet_of(heir), heir, 0)], is_open=False)
    place = chain.standing
    start = StageStart(0, committee, place.height, own.outer_step, own.root, place.value)
    named = HeirNaming(base.statement, 0, place.height, chain.ledger.heir.wallet_id)
    return Founding("e" * 64, 0, start, base.owner, heir=named, others=(base,))


def test_the_heir_completes_steps_again_and_the_seat_that_comes_back_follows_it() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        foundings = [founding_of([A])]
        seat = SimulatedReplica(A, network, 0, may_be_alone=True, founding=lambda: foundings[0], copy_keeper=B)
        await for_seconds(4 * DUE_SECONDS, seat)
        made, book = seat.state.outer_step, seat.book
        assert made >= 2
        network.kill(A)
        heir = SimulatedReplica(
            B, network, 1, may_be_alone=True, state=seat.state, founding=lambda: foundings[0], store=seat.store
        )
        await for_seconds(8 * DUE_SECONDS, heir)
        assert heir.state.outer_step == made  # it may not certify what it trains
        foundings[0] = inherited(foundings[0], heir)
        await for_seconds(4 * DUE_SECONDS, heir)
        assert heir.state.outer_step > made
        chain = heir.group.chain.chain
        assert chain is not None
        assert chain.statement == foundings[0].statement
        assert chain.standing.root == heir.replica_status().root
        back = SimulatedReplica(
            A,
            network,
            0,
            may_be_alone=True,
            state=seat.state,
            founding=lambda: foundings[0],
            store=seat.store,
            book=book,
        )
        await for_seconds(4 * DUE_SECONDS, heir, back)
        assert back.group.must_follow.is_set()
        assert back.group.chain.chain is not None
        assert back.group.chain.chain.statement == foundings[0].statement
        assert back.group.chain.fork is None

    play(scenario)


def test_a_seat_that_went_on_and_its_former_heir_stay_apart_until_the_owner_decides() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        base = founding_of([A])
        foundings = [base]
        seat = SimulatedReplica(A, network, 0, may_be_alone=True, founding=lambda: foundings[0], copy_keeper=B)
        await for_seconds(4 * DUE_SECONDS, seat)
        state, kept, by_heir = replace(seat.state), InMemoryChainStore(), inherited(base, seat)
        kept.stored = seat.store.read()
        seat.copy_keeper = C
        await for_seconds(3 * DUE_SECONDS, seat)
        assert heir_of(seat) == wallet_of(C)
        foundings[0] = by_heir
        heir = SimulatedReplica(
            B, network, 1, may_be_alone=True, state=state, founding=lambda: foundings[0], store=kept
        )
        made = [each.state.outer_step for each in (seat, heir)]
        await for_seconds(4 * DUE_SECONDS, seat, heir)
        lines = [line for each in (seat, heir) if (line := each.group.chain.chain) is not None]
        assert [line.statement for line in lines] == [base.statement, "e" * 64]
        assert all(each.state.outer_step > before for each, before in zip((seat, heir), made, strict=True))
        assert seat.group.chain.fork is heir.group.chain.fork is None
        own, place = seat.replica_status(), lines[0].standing
        start = StageStart(0, base.start.committee, place.height, own.outer_step, own.root, place.value)
        foundings[0] = Founding("d" * 64, 1, start, base.owner)
        await for_seconds(4 * DUE_SECONDS, seat, heir)
        assert seat.state.outer_step > own.outer_step
        assert heir.group.must_follow.is_set()
        assert heir.group.chain.chain is not None
        assert heir.group.chain.chain.statement == "d" * 64

    play(scenario)
