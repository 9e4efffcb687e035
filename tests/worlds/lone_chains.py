"""The chain of a stage with one seat, whose node makes every step alone, for nodes that do not train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

from msgspec import structs

from neuroshard.consensus.chain import Chain, Step
from neuroshard.consensus.committee import Committee, Seat
from neuroshard.consensus.foundation import Foundation, SignedFoundation, StageStart
from neuroshard.consensus.round_messages import NO_DIGEST, Phase, Quorum, Vote, signed_by
from tests.worlds.nodes import OWNER, StageNode, StageWorld


def certified_lone_steps(
    world: StageWorld, holder: StageNode, roots: Sequence[str], *, is_open: bool = False
) -> tuple[SignedFoundation, list[Chain]]:
    """The owner's foundation with the holder as the only seat of stage 0, and the chain after each of its steps."""
    member = Seat(holder.identity.wallet_id, holder.name, 0)
    start = StageStart(0, Committee.founded([member], is_open=is_open))
    statement = SignedFoundation.sign(OWNER, Foundation(world.offer.run_id, 0, (start,)))
    holder.swarm.versions.learn_foundations(holder.swarm.versions.foundations.with_statements([statement]))
    founding = holder.swarm.versions.founding_of(0)
    assert founding is not None
    chains = [Chain.founded(founding)]
    for number, (root, next_root) in enumerate(pairwise([NO_DIGEST, *roots])):
        chain = chains[-1]
        step = Step(world.offer.run_id, 0, number, root, "terms", chain.standing, chain.ledger, chain.owner)
        value = step.completed(structs.replace(step.first_value(), outer_step=number + 1, next_root=next_root))
        vote = signed_by(holder.identity, Vote(step.id, 0, Phase.COMMIT, value.digest), holder.now())
        chains.append(chain.extended(Quorum(value, 0, Phase.COMMIT, (vote,))))
    return statement, chains[1:]


def show_chain(holder: StageNode, chain: Callable[[], Chain]) -> None:
    """Answer requests for the chain of stage 0 with this one."""

    class Shown:
        stage = holder.swarm.name_of(0)

        @property
        def chain(self) -> SimpleNamespace:
            return SimpleNamespace(chain=chain())

    holder.swarm.rounds.add(cast("Any", Shown()))
