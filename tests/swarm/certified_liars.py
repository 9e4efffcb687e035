"""What members of a round that do not keep to the protocol do instead, each by one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from random import Random

from certified_world import Participant, signed_as
from msgspec import structs

from neuroshard.consensus.effects import Effect, Persist, Say
from neuroshard.consensus.roster import digest_of
from neuroshard.consensus.round_messages import (
    ContributionSent,
    NewView,
    NewViewSaid,
    Phase,
    ProposalSaid,
    ResultDigests,
    ResultSaid,
    RoundProposal,
    StatementSaid,
    StatisticsDigests,
    VoteSaid,
    round_id_of,
)
from neuroshard.types import NodeId

Twist = Callable[[Participant, Effect], list[Effect]]


def halves(to: frozenset[NodeId]) -> tuple[frozenset[NodeId], frozenset[NodeId]]:
    names = sorted(to)
    return frozenset(names[: len(names) // 2]), frozenset(names[len(names) // 2 :])


def wrong_results(one: Participant, effect: Effect) -> list[Effect]:
    """Every slice that it reduces comes out differently."""
    match effect:
        case Say(to, ResultSaid(signed, slices)):
            lies = {index: b"lie" + part for index, part in slices.items()}
            digests = tuple(
                (index, sha256(f"lie {digest}".encode()).hexdigest()) for index, digest in signed.body.digests
            )
            return [Say(to, ResultSaid(signed_as(one.member, ResultDigests(signed.body.round_id, digests)), lies))]
        case _:
            return [effect]


def wrong_statistics(one: Participant, effect: Effect) -> list[Effect]:
    match effect:
        case Say(to, StatementSaid(signed, statistics)):
            lies = {index: b"lie" + part for index, part in statistics.items()}
            digests = tuple((index, digest_of(part).hex()) for index, part in sorted(lies.items()))
            return [
                Say(to, StatementSaid(signed_as(one.member, StatisticsDigests(signed.body.round_id, digests)), lies))
            ]
        case _:
            return [effect]


def two_contributions(_one: Participant, effect: Effect) -> list[Effect]:
    """Other parts to every other reducer than it had promised."""
    match effect:
        case Say(to, ContributionSent(slices=slices) as message) if sum(map(ord, min(to))) % 2:
            return [Say(to, replace(message, slices={index: b"x" + part for index, part in slices.items()}))]
        case _:
            return [effect]


def withheld_contribution(_one: Participant, effect: Effect) -> list[Effect]:
    match effect:
        case Say(message=ContributionSent()):
            return []
        case _:
            return [effect]


def two_votes(one: Participant, effect: Effect) -> list[Effect]:
    """This value to one half, another one to the other."""
    match effect:
        case Say(to, VoteSaid(signed)):
            left, right = halves(to)
            other = structs.replace(signed.body, value=sha256(signed.body.value.encode()).hexdigest())
            return [Say(left, VoteSaid(signed)), Say(right, VoteSaid(signed_as(one.member, other)))]
        case _:
            return [effect]


def both_votes(one: Participant, effect: Effect) -> list[Effect]:
    """Two values to everybody."""
    match effect:
        case Say(to, VoteSaid(signed)):
            other = structs.replace(signed.body, value=sha256(signed.body.value.encode()).hexdigest())
            return [effect, Say(to, VoteSaid(signed_as(one.member, other)))]
        case _:
            return [effect]


def two_proposals(one: Participant, effect: Effect) -> list[Effect]:
    """A round without the last member to one half."""
    match effect:
        case Say(to, ProposalSaid(signed, intents, None)) if len(intents) > 2:
            left, right = halves(to)
            fewer = intents[:-1]
            return [Say(left, ProposalSaid(signed, intents)), Say(right, ProposalSaid(signed, fewer))]
        case _:
            return [effect]


def no_memory(_one: Participant, effect: Effect) -> list[Effect]:
    """It writes nothing down."""
    return [] if isinstance(effect, Persist) else [effect]


def far_views(one: Participant, effect: Effect) -> list[Effect]:
    match effect:
        case Say(to, VoteSaid(signed)):
            far = NewView(signed.body.step_id, 9_000, ())
            return [effect, Say(to, NewViewSaid(signed_as(one.member, far)))]
        case _:
            return [effect]


def silence(_one: Participant, effect: Effect) -> list[Effect]:
    return [] if isinstance(effect, Say) else [effect]


def honesty(_one: Participant, effect: Effect) -> list[Effect]:
    return [effect]


def votes_far_ahead(one: Participant, effect: Effect) -> list[Effect]:
    """So many votes in views to come that there would be no room for others in the present one."""
    match effect:
        case Say(to, VoteSaid(signed)):
            far = [
                structs.replace(signed.body, view=9_000 + view, phase=phase) for view in range(70) for phase in Phase
            ]
            return [*(Say(to, VoteSaid(signed_as(one.member, vote))) for vote in far), effect]
        case _:
            return [effect]


def proposals_far_ahead(one: Participant, effect: Effect) -> list[Effect]:
    """Beside its statement it proposes the same round in a view near the last one."""
    match effect:
        case Say(to, StatementSaid()):
            proposals = list[Effect]()
            for machine in one.machines.values():
                step, intents = machine.setting.step, machine._views.chosen_intents()  # pyright: ignore[reportPrivateUsage]
                view = next(view for view in range(9_990, 0, -1) if step.proposer(view) == one.member.node_id)
                body = RoundProposal(step.id, view, round_id_of(step, view, intents), None)
                proposals.append(Say(to, ProposalSaid(signed_as(one.member, body), intents, None)))
            return [*proposals, effect]
        case _:
            return [effect]


LIARS: Mapping[str, Twist] = {
    twist.__name__: twist
    for twist in (
        wrong_results,
        wrong_statistics,
        two_contributions,
        withheld_contribution,
        two_votes,
        both_votes,
        two_proposals,
        no_memory,
        far_views,
        votes_far_ahead,
        proposals_far_ahead,
        silence,
    )
}


def anything(seed: int) -> Twist:
    """Another lie at every turn."""
    random = Random(seed)

    def lie(one: Participant, effect: Effect) -> list[Effect]:
        return random.choice([*LIARS.values(), honesty])(one, effect)

    return lie
