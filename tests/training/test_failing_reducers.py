"""A replica that takes part in rounds and computes nothing: the real rounds of the others bar it from reducing."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from neuroshard.consensus.chain import Chain, ChainProof
from neuroshard.consensus.committee import SILENT_STEPS, Bar
from neuroshard.consensus.effects import Effect, Say
from neuroshard.consensus.round_messages import ContributionSent, PartsWanted, ResultSaid, StatementSaid
from neuroshard.consensus.stage_chain import StageChain
from neuroshard.network import InMemoryNetwork
from neuroshard.types import NodeId
from tests.worlds.clock import at_once
from tests.worlds.replicas import DUE_SECONDS, NAMES, SimulatedReplica, for_seconds, founding_of, play
from tests.worlds.rounds import Liar

SEATS = NAMES[:4]


def chain_of(replica: SimulatedReplica) -> Chain:
    chain = replica.group.chain.chain
    assert chain is not None
    return chain


class Deals:
    """Notes who gets parts in which outer step. One node can be silent."""

    def __init__(self) -> None:
        self.reducing: dict[int, Counter[NodeId]] = {}
        self.hung: NodeId | None = None

    def note(self, one: Liar, effect: Effect) -> list[Effect]:
        (machine,) = one.machines.values()
        match effect:
            case Say(message=StatementSaid() | ResultSaid() | PartsWanted()) if one.member.node_id == self.hung:
                return []
            case Say(to, ContributionSent(author=author)) if author == one.member.node_id:
                self.reducing.setdefault(machine.setting.step.number, Counter()).update(to)
            case _:
                pass
        return [effect]


@pytest.mark.parametrize("is_open", [False, True])
def test_seats_bar_a_replica_that_computes_nothing(is_open: bool) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        replicas = [
            SimulatedReplica(name, network, seed, seats=SEATS, is_open=is_open) for seed, name in enumerate(SEATS)
        ]
        deals = Deals()
        for each in replicas:
            each.lie = deals.note
        await for_seconds(3 * DUE_SECONDS, *replicas)
        reducing = sum(deals.reducing.values(), Counter[NodeId]())
        deals.hung = max(reducing.keys() - {SEATS[0]}, key=lambda node: reducing[node])
        await for_seconds(14 * DUE_SECONDS, *replicas)
        chains = [chain_of(each) for each in replicas]
        entries = [(each.value.outer_step, entry) for each in chains[0].recent for entry in each.value.entries]
        number = entries[0][0]
        assert {entry for _, entry in entries} == {Bar(deals.hung)}
        assert len({chain.ledger.barred for chain in chains}) == 1
        assert [one.node_id for one in chains[0].ledger.barred] == [deals.hung]
        assert chains[0].ledger.barred[0].until >= number + SILENT_STEPS
        later = [nodes for step, nodes in deals.reducing.items() if number <= step]
        assert len(later) > 3
        assert not any(deals.hung in nodes for nodes in later)
        founded = Chain.founded(founding_of(SEATS, is_open=is_open))
        proof = msgspec.msgpack.decode(msgspec.msgpack.encode(chains[0].proof()), type=ChainProof)
        assert founded.proven(proof).ledger == chains[0].ledger
        stored = StageChain(lambda: founding_of(SEATS, is_open=is_open), replicas[0].store, at_once)
        await stored.load()
        assert stored.ledger == chains[0].ledger

    play(scenario)
