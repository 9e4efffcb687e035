"""Rounds that replicas really held, as each of them tells of them."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.consensus.group_rounds import RoundRequestHandlers
from neuroshard.consensus.round_status import NO_ANSWER
from neuroshard.network import InMemoryNetwork, Link
from neuroshard.status.rounds import AbandonReason, MemberPart
from tests.worlds.replicas import DUE_SECONDS, NAMES, STAGE, A, B, C, SimulatedReplica, for_seconds, play

D = NAMES[3]


@dataclass
class Freeloader(SimulatedReplica):
    """Says that it trains, and brings nothing."""

    async def _step(self) -> None:
        await super()._step()
        self.weights = self.state.anchor.clone()


def test_everybody_tells_the_same_of_a_round_and_who_was_refused_and_why() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        honest = [SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C))]
        lazy = Freeloader(D, network, 4)
        await for_seconds(DUE_SECONDS + 5, *honest, lazy)
        for replica in (*honest, lazy):
            (record,) = replica.group.status.recent
            assert record.outer_step == 0
            assert {one.node_id: one.part for one in record.members} == {
                A: MemberPart.ACCEPTED,
                B: MemberPart.ACCEPTED,
                C: MemberPart.ACCEPTED,
                D: MemberPart.REFUSED,
            }
            assert {one.reason for one in record.members if one.node_id == D} == {"it is zero"}
            assert replica.group.status.refused == (("zero", 1),)
            assert record.certificate is not None
            assert record.certificate.voters == 3  # the seats
            assert record.certificate.votes >= 2
            assert record.bytes_sent > 0
            assert record.bytes_received > 0
        values = {one.group.status.recent[0].certificate.value for one in honest}  # type: ignore[union-attr]
        assert len(values) == 1
        assert honest[0].group.status.layers == STAGE.layers
        root = honest[0].replica_status().root
        assert honest[0].group.certified_root(1) == root
        assert honest[0].group.certified_root(2) == ""

    play(scenario)


def test_the_bytes_of_all_rounds_are_what_the_mail_has_carried() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        await for_seconds(4 * DUE_SECONDS, a, b)
        for one, other in ((a, b), (b, a)):
            told, mail = one.group.status, one.group.actor.mail
            assert told.completed == len(told.recent) >= 3
            assert told.bytes_sent == sum(record.bytes_sent for record in told.recent) <= mail.sent_bytes
            assert mail.sent_bytes == other.group.actor.mail.received_bytes

    play(scenario)


def test_a_stage_that_is_held_here_again_goes_on_with_its_list() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        await for_seconds(DUE_SECONDS + 5, a, b)
        door = RoundRequestHandlers()
        door.add(a.group)
        assert door.earlier(STAGE) is None
        door.clear()
        told = door.earlier(STAGE)
        assert told is a.group.status
        network.kill(A)
        again = SimulatedReplica(A, network, 3, told=told, book=a.book)
        again.follow(b)
        await for_seconds(2 * DUE_SECONDS, again, b)
        steps = [record.outer_step for record in again.group.status.recent]
        assert steps == list(range(len(steps)))
        assert again.group.status.completed == len(steps) >= 2
        assert again.group.status.bytes_sent == sum(record.bytes_sent for record in again.group.status.recent)
        assert all(record.bytes_sent > 0 for record in again.group.status.recent)

    play(scenario)


def test_the_phases_take_the_time_that_messages_take() -> None:
    slow_seconds = 1.5

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        network.set_link(B, A, Link(delay_seconds=slow_seconds))  # all that B sends
        await for_seconds(DUE_SECONDS + 60, a, b)
        phases = a.group.status.recent[0].phases
        assert phases.exchange >= slow_seconds
        assert phases.vote >= slow_seconds
        assert phases.total >= 3 * slow_seconds

    play(scenario)


def test_who_votes_no_and_is_outvoted_tells_of_both() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        c.objects = "The loss rises."  # from now on two of three votes are enough
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        first, against, late = c.group.status.recent
        assert (first.outer_step, first.abandoned_for, first.is_late) == (0, None, False)
        assert (against.outer_step, against.abandoned_for) == (1, AbandonReason.OBJECTION)
        assert (late.outer_step, late.abandoned_for, late.is_late) == (1, None, True)
        assert late.certificate is not None
        assert late.certificate.votes >= 2
        assert c.group.status.accepted == a.group.status.accepted == 6  # each contribution counts once
        assert c.group.certified_root(2) == a.group.certified_root(2) == a.replica_status().root

    play(scenario)


def test_two_of_whom_one_brings_nothing_end_their_round_with_the_other_and_say_so() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), Freeloader(B, network, 2)
        await for_seconds(DUE_SECONDS + 5, a, b)
        record = a.group.status.recent[0]
        assert record.abandoned_for is None
        assert {one.node_id: one.refusal for one in record.members} == {A: "", B: "zero"}
        assert (a.group.status.completed, a.group.status.accepted) == (1, 1)
        assert a.group.certified_root(1) == b.group.certified_root(1) == a.replica_status().root


def test_a_round_to_which_all_bring_nothing_is_abandoned_and_says_so() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = Freeloader(A, network, 1), Freeloader(B, network, 2)
        await for_seconds(DUE_SECONDS + 5, a, b)
        record = a.group.status.recent[0]
        assert record.abandoned_for is AbandonReason.CONTRIBUTIONS
        assert record.reason == "no contribution was accepted: it is zero"
        assert {one.node_id: one.refusal for one in record.members} == {A: "zero", B: "zero"}
        assert (a.group.status.completed, a.group.status.accepted, a.group.certified_root(1)) == (0, 0, "")

    play(scenario)


def test_a_round_to_which_the_other_does_not_come_is_told_with_all_who_were_called() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2, is_reluctant=True)
        await for_seconds(DUE_SECONDS + 50, a, b)
        record = a.group.status.recent[0]
        assert (record.abandoned_for, record.reason) == (AbandonReason.NO_ANSWER, NO_ANSWER)
        assert {one.node_id: one.part for one in record.members} == dict.fromkeys((A, B), MemberPart.UNJUDGED)
        assert record.phases.gather == record.phases.total >= 20
        assert b.group.status.recent == ()  # it was in none

    play(scenario)


def test_who_votes_against_an_aggregate_tells_why() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        a.objects = b.objects = "The loss rises."
        await for_seconds(DUE_SECONDS + 60, a, b)
        record = a.group.status.recent[0]
        assert (record.abandoned_for, record.reason) == (AbandonReason.OBJECTION, "this node votes no: The loss rises.")
        assert {one.part for one in record.members} == {MemberPart.ACCEPTED}

    play(scenario)
