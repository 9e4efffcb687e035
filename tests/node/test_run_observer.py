"""The observer reports each certificate once, with facts that its voters signed, and compares reports over time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from neuroshard.consensus.chain import Chain
from neuroshard.consensus.committee import Committee, EntryRules, GroupMember, Seat
from neuroshard.consensus.foundation import Founding, StageStart
from neuroshard.consensus.round_messages import Phase, Quorum, Value, Vote, signed_by
from neuroshard.membership.reports import TrainingReport
from neuroshard.membership.swarm_view import NOTHING, Member
from neuroshard.node.run_observer import Reporters, certified_values
from neuroshard.status.snapshot import NodeState
from neuroshard.types import LayerRange, NodeId
from tests.consensus.test_chain import OWNER, value_on
from tests.worlds.claims import EPOCH, REPORT, identity_of

IDENTITIES = [identity_of(number) for number in range(3)]
SEATS = [GroupMember(one.node_id, one.wallet_id) for one in IDENTITIES]


def founded(statement: str = "f" * 64) -> Chain:
    seats = [Seat(member.wallet_id, member.node_id, 0) for member in SEATS]
    return Chain.founded(Founding(statement, 0, StageStart(0, Committee.founded(seats, is_open=False)), OWNER))


def certified(value: Value, dates: Sequence[float]) -> Quorum:
    """The value with a vote of each seat at a date."""
    vote = Vote(value.step_id, 0, Phase.COMMIT, value.digest)
    votes = tuple(signed_by(one, vote, at) for one, at in zip(IDENTITIES, dates, strict=True))
    return Quorum(value, 0, Phase.COMMIT, votes)


def longer(chain: Chain, at: float) -> Chain:
    return chain.extended(certified(value_on(chain, members=SEATS), (at, at + 5, at + 1000)))


def test_every_value_is_reported_once_with_the_median_date_of_its_votes() -> None:
    first = longer(longer(founded(), EPOCH), EPOCH + 60)
    told = certified_values(first, None)
    assert [(value.height, value.at) for value in told] == [(1, int(EPOCH) + 5), (2, int(EPOCH) + 65)]
    assert told[0].accepted == tuple(sorted(member.wallet_id for member in SEATS))
    assert (told[0].kind, told[0].members, told[0].seconds) == ("aggregate", 3, 600)
    second = longer(first, EPOCH + 120)
    assert [value.height for value in certified_values(second, first)] == [3]
    assert certified_values(second, second) == []
    other = longer(founded("e" * 64), EPOCH)  # after another foundation all are news
    assert [value.statement for value in certified_values(other, second)] == ["e" * 64]


def test_values_without_an_aggregate_name_no_work() -> None:
    chain = founded()
    empty = msgspec.structs.replace(
        value_on(chain, members=()), round_id=None, aggregate=(), seconds=0, next_root="7" * 64
    )
    for value, kind in (
        (empty, "alone"),
        (msgspec.structs.replace(empty, next_root=empty.root), "entries"),
    ):
        ledger = chain.ledger.after(value, EntryRules(1, OWNER)).digest
        last = chain.extended(certified(msgspec.structs.replace(value, ledger=ledger), (EPOCH,) * 3))
        (told,) = certified_values(last, None)
        assert (told.kind, told.accepted, told.sequences) == (kind, (), 0)


def member(name: str, seen: float = EPOCH, **facts: object) -> Member:
    report: TrainingReport = msgspec.structs.replace(REPORT, **facts)
    return Member(NodeId(name), IDENTITIES[0].wallet_id, report, NOTHING, seen, seen)


def test_new_tokens_are_those_of_drivers_since_the_last_look() -> None:
    reporters = Reporters(EPOCH)
    later = LayerRange(4, 12)
    assert reporters.new_tokens([member("a", tokens=1000), member("b", tokens=50, layers=later)]) == 0
    assert reporters.new_tokens([member("a", tokens=1300), member("b", tokens=90, layers=later)]) == 300
    assert reporters.new_tokens([member("a", tokens=200), member("c", tokens=10**9)]) == 0  # an older checkpoint
    assert reporters.new_tokens([member("a", tokens=250), member("c", tokens=10**9 + 7)]) == 57
    assert reporters.new_tokens([member("a", tokens=900, inherited_tokens=640)]) == 10


def test_a_node_is_ready_once_per_start_that_was_seen() -> None:
    reporters, start = Reporters(EPOCH), EPOCH + 100
    assert reporters.ready([member("old", started_at=EPOCH - 500)]) == ()  # it trained before the observer came
    assert reporters.ready([member("new", state=NodeState.STARTING, started_at=start)]) == ()
    (ready,) = reporters.ready([member("new", start + 42, started_at=start)])
    assert (ready.node, ready.seconds) == ("new", 42)
    assert reporters.ready([member("new", start + 60, state=NodeState.PAUSED, started_at=start)]) == ()
    assert reporters.ready([member("new", start + 90, started_at=start)]) == ()
    assert len(reporters.ready([member("new", start + 500, started_at=start + 480)])) == 1  # a restart
