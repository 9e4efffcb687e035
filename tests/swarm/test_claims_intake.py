from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from neuroshard.identity import NodeIdentity, TokenSecret, Wallet, sign_claim
from neuroshard.identity.pass_register import PassRegister
from neuroshard.membership.announcements import Announcement
from neuroshard.membership.claim_intake import (
    ANNOUNCEMENT_RULES,
    BURST_CLAIMS,
    LATE_SECONDS,
    MAX_REPORT_AGE_SECONDS,
    MAX_SPEAKERS,
    REPORT_KIND,
    REPORT_RULES,
    ClaimCache,
    ClaimIntake,
    Refusal,
    Statement,
    signed_announcement,
    signed_report,
)
from neuroshard.membership.clock_skew import CLOCK_WITNESSES, WITNESS_SECONDS
from neuroshard.membership.reports import MAX_REPORT_BYTES, TrainingReport
from neuroshard.membership.run_members import MAX_NODES, MOST_UNKNOWN, PASS_SECONDS, RunMembers
from neuroshard.network import ScoreReason
from neuroshard.types import NodeId
from tests.worlds.claims import (
    DAY,
    EPOCH,
    OTHER_RUN,
    REPORT,
    RUN,
    altered,
    announcement_of,
    encodings_of,
    identity_of,
    told,
)

ALICE, BOB = identity_of(1), identity_of(2)


@dataclass
class Desk:
    """An intake of reports with a clock that the test moves."""

    time: float = EPOCH
    cache: ClaimCache[TrainingReport] = field(default_factory=lambda: ClaimCache(REPORT_RULES))

    def __post_init__(self) -> None:
        self.intake = ClaimIntake(REPORT_RULES, RUN, lambda: self.time, self.cache)

    def say(self, identity: NodeIdentity, sequence: int, **changes: Any) -> bytes:
        return signed_report(identity, replace(REPORT, sequence=sequence, **changes), self.time)

    def repeat(self, identity: NodeIdentity, data: bytes) -> None:
        """A claim of a node is passed on once more and not counted once more."""
        heard = self.intake.check(data)
        assert isinstance(heard, Statement)
        assert heard.node_id == identity.node_id
        again = self.intake.take(data)
        assert isinstance(again, Refusal)
        assert again.reason is None

    def reason(self, data: bytes, **arguments: Any) -> ScoreReason | None:
        """Why a claim is refused, the same by `check` and `take`."""
        checked = self.intake.check(data, **arguments)
        taken = self.intake.take(data, **arguments)
        assert isinstance(checked, Refusal)
        assert checked == taken
        return checked.reason


def signed_payload(identity: NodeIdentity, payload: Any, kind: str = REPORT_KIND, at: float = EPOCH) -> bytes:
    return sign_claim(identity, kind, payload, at).encode()


STEPS = TrainingReport.__struct_fields__.index("steps")


def with_steps(steps: int) -> Callable[[list[Any]], None]:
    """Another number of steps in the payload of a claim."""

    def change(content: list[Any]) -> None:
        content[0][STEPS] = steps

    return change


def test_a_good_report_is_heard_once_with_its_author() -> None:
    desk = Desk()
    data = desk.say(ALICE, 5)
    assert isinstance(desk.intake.check(data), Statement)
    assert isinstance(desk.intake.check(data), Statement)  # a check is no hearing
    heard = desk.intake.take(data)
    assert isinstance(heard, Statement)
    assert (heard.node_id, heard.wallet_id, heard.issued_at) == (ALICE.node_id, ALICE.wallet_id, EPOCH)
    assert heard.value == replace(REPORT, sequence=5)


def test_a_report_in_other_bytes_is_malformed_and_never_counts_as_a_replay() -> None:
    desk = Desk()
    shortest, *others = encodings_of(desk.say(ALICE, 5))
    assert {desk.reason(other) for other in others} == {ScoreReason.MALFORMED_CLAIM}
    assert isinstance(desk.intake.take(shortest), Statement)
    assert {desk.reason(other) for other in others} == {ScoreReason.MALFORMED_CLAIM}
    desk.repeat(ALICE, shortest)


def test_a_report_that_came_from_its_author_may_come_by_gossip_too_but_not_much_later() -> None:
    desk = Desk()
    data = desk.say(ALICE, 5)
    assert isinstance(desk.intake.take(data, sender=ALICE.node_id), Statement)
    desk.repeat(ALICE, data)
    assert desk.reason(desk.say(ALICE, 5, steps=9)) is ScoreReason.REPLAYED_CLAIM  # another report of the same number
    desk.time += LATE_SECONDS + 1
    assert desk.reason(data) is ScoreReason.REPLAYED_CLAIM
    again = desk.intake.take(data, sender=ALICE.node_id)
    assert isinstance(again, Refusal)
    assert again.reason is None


def test_sequences_must_rise_and_what_is_late_is_nobodys_fault() -> None:
    desk = Desk()
    early, late, newest = desk.say(ALICE, 1), desk.say(ALICE, 2), desk.say(ALICE, 3)
    assert isinstance(desk.intake.take(early), Statement)
    assert isinstance(desk.intake.take(newest), Statement)
    assert desk.reason(late) is None
    assert desk.reason(early) is None  # it came from its author, then by a slower way
    assert isinstance(desk.intake.take(desk.say(BOB, 1)), Statement)  # everybody counts alone
    desk.time += 100
    assert isinstance(desk.intake.take(desk.say(ALICE, 4)), Statement)
    assert desk.reason(late) is ScoreReason.REPLAYED_CLAIM  # so late is not by chance
    assert desk.intake.refused == {"late": 2, "replayed_claim": 1}


def test_nobody_may_bring_anothers_report_as_its_own() -> None:
    desk = Desk()
    data = desk.say(ALICE, 1)
    desk.intake.take(data)
    desk.repeat(ALICE, data)
    assert desk.reason(data, sender=BOB.node_id) is ScoreReason.FOREIGN_CLAIM
    assert desk.reason(desk.say(ALICE, 2), sender=BOB.node_id) is ScoreReason.FOREIGN_CLAIM


def test_reports_of_other_runs_or_other_purposes_are_foreign() -> None:
    desk = Desk()
    other = desk.intake.check(desk.say(ALICE, 1, run_id=OTHER_RUN))
    assert isinstance(other, Refusal)
    assert other.is_other_run
    assert other.explanation == f"This node serves run {RUN[:16]}, not run {OTHER_RUN[:16]}."
    assert desk.reason(desk.say(ALICE, 1, run_id=OTHER_RUN)) is ScoreReason.FOREIGN_CLAIM
    assert desk.reason(signed_payload(ALICE, REPORT, "announcement")) is ScoreReason.BAD_SIGNATURE


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_a_day_off_is_refused(days: int) -> None:
    desk = Desk()
    data = signed_report(ALICE, REPORT, EPOCH + days * DAY)
    refusal = desk.intake.check(data)
    assert isinstance(refusal, Refusal)
    assert f"86400 s {'ahead' if days > 0 else 'ago'}" in refusal.explanation
    assert desk.reason(data) is ScoreReason.EXPIRED_CLAIM


def test_ages_are_bounded_on_both_sides() -> None:
    for seconds, is_fine in (
        (-MAX_REPORT_AGE_SECONDS + 1, True),
        (-MAX_REPORT_AGE_SECONDS - 1, False),
        (299, True),
        (301, False),
    ):
        desk = Desk()
        data = signed_report(ALICE, REPORT, EPOCH + seconds)
        assert isinstance(desk.intake.check(data), Statement) == is_fine


def test_a_delegation_that_ran_out_ends_a_nodes_reports() -> None:
    desk = Desk()
    short = identity_of(3, EPOCH + 100)
    assert isinstance(desk.intake.check(desk.say(short, 1)), Statement)
    desk.time += 101
    assert desk.reason(desk.say(short, 2)) is ScoreReason.EXPIRED_CLAIM
    data = signed_report(short, REPORT, EPOCH + 99)
    assert desk.reason(data) is ScoreReason.EXPIRED_CLAIM


def test_forgeries_of_every_kind_are_refused() -> None:
    desk = Desk()
    data, bobs = signed_payload(ALICE, REPORT), msgspec.msgpack.decode(signed_payload(BOB, REPORT))
    (grant, vouched), (bobs_grant, bobs_vouched) = (
        msgspec.msgpack.decode(msgspec.msgpack.decode(one)[0])[2] for one in (data, signed_payload(BOB, REPORT))
    )
    assert grant[-5:] == bobs_grant[-5:]  # both end with the same time
    contents: list[Callable[[list[Any]], object]] = [
        with_steps(10**9),
        lambda content: content.__setitem__(1, EPOCH + 1),
        lambda content: content.__setitem__(2, [bobs_grant, bobs_vouched]),
        lambda content: content.__setitem__(2, [grant[:-1] + b"\xff", vouched]),  # a later end
        lambda content: content.__setitem__(2, [grant[:-39] + bobs_grant[-39:], vouched]),  # another wallet
        lambda content: content.__setitem__(2, [grant, bobs_vouched]),
    ]
    for change in contents:
        assert desk.reason(altered(data, change)) is ScoreReason.BAD_SIGNATURE
    assert desk.reason(data[:-64] + bobs[1]) is ScoreReason.BAD_SIGNATURE
    assert isinstance(desk.intake.take(data), Statement)  # the true one is not harmed by them
    # a forger with an honest node's delegation but another key
    forged = data[:-64] + BOB.key.sign(b"x")
    assert desk.reason(forged) is ScoreReason.REPLAYED_CLAIM  # refused before a signature is looked at


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("loss_ema", nan),
        ("loss_ema", inf),
        ("loss_ema", -1),
        ("tokens_per_second", 1e300),
        ("steps", 2**64 - 1),
        ("steps", "1"),
        ("tokens", 10**17),
        ("tokens", 1.5),
    ],
)
def test_numbers_that_would_spoil_sums_never_get_in(name: str, lie: object) -> None:
    desk = Desk()
    place = TrainingReport.__struct_fields__.index(name)
    fine, wrong = (
        altered(signed_payload(ALICE, REPORT), lambda content, value=value: content[0].__setitem__(place, value))
        for value in (1, lie)
    )
    assert desk.reason(fine) is ScoreReason.BAD_SIGNATURE
    assert desk.cache.verifications == 1  # it was read: only the number is wrong
    assert desk.reason(wrong) is ScoreReason.MALFORMED_CLAIM
    assert desk.cache.verifications == 1


def test_a_liar_that_signs_its_lies_is_refused_by_the_schema() -> None:
    desk = Desk()
    for lie in (
        {"loss_ema": 1e200},
        {"steps": 10**13},
        {"layers": [5, 5]},
        {"roles": ["king"]},
        {"extra": 1},
        {"state": "`$[999]`"},
    ):
        data = signed_payload(ALICE, told(REPORT, **lie))
        assert desk.reason(data) is ScoreReason.MALFORMED_CLAIM
    assert desk.cache.verifications == 0  # nobody's signature was worth the time


def test_size_comes_before_everything() -> None:
    desk = Desk()
    assert desk.reason(bytes(MAX_REPORT_BYTES + 1)) is ScoreReason.OVERSIZED
    assert desk.reason(b"\x92garbage") is ScoreReason.MALFORMED_CLAIM
    assert desk.reason(b"") is ScoreReason.MALFORMED_CLAIM


@given(st.binary(max_size=MAX_REPORT_BYTES + 10))
def test_any_bytes_are_refused_for_a_reason(data: bytes) -> None:
    assert Desk().reason(data) in {ScoreReason.MALFORMED_CLAIM, ScoreReason.OVERSIZED}


def test_a_claim_is_verified_once_however_many_copies_come_to_however_many_intakes() -> None:
    desks = [Desk()]
    desks += [Desk(cache=desks[0].cache) for _ in range(9)]
    data = desks[0].say(ALICE, 1)
    for desk in desks:
        assert isinstance(desk.intake.check(data), Statement)
        assert isinstance(desk.intake.take(data), Statement)
        desk.repeat(ALICE, data)
    assert desks[0].cache.verifications == 1
    forged = altered(signed_payload(BOB, REPORT), with_steps(7))
    for desk in desks:
        assert desk.reason(forged) is ScoreReason.BAD_SIGNATURE
    assert desks[0].cache.verifications == 2


def test_the_cache_is_bounded_and_reads_again_what_it_forgot() -> None:
    cache = ClaimCache(REPORT_RULES, max_bytes=16_000)
    desk = Desk(cache=cache)
    claims = [desk.say(ALICE, number) for number in range(12)]
    for data in claims:
        assert isinstance(cache.read(data), Statement)
    assert 4 <= len(cache._known) <= 6
    for number in range(100):  # what cannot be read fills no more of it
        assert isinstance(cache.read(bytes((number,)) * 2000), Refusal)
    assert len(cache._known) <= 2
    desk.time += 60
    assert isinstance(desk.intake.take(claims[0]), Statement)


def test_one_node_may_not_flood_and_it_is_its_own_fault() -> None:
    desk = Desk()
    taken = 0
    for sequence in range(50):
        heard = desk.intake.take(desk.say(ALICE, sequence))
        taken += isinstance(heard, Statement)
        if isinstance(heard, Refusal):
            assert heard.reason is ScoreReason.FLOOD
            assert heard.culprit == ALICE.node_id
    assert taken == BURST_CLAIMS
    assert isinstance(desk.intake.take(desk.say(BOB, 1)), Statement)
    for sequence in range(100, 200):  # at the usual pace all is well again
        desk.time += 2
        assert isinstance(desk.intake.take(desk.say(ALICE, sequence)), Statement)


def test_what_a_stalled_line_brings_at_once_was_said_at_its_own_pace() -> None:
    desk, claims = Desk(), list[bytes]()
    for sequence in range(30):
        claims.append(desk.say(ALICE, sequence))
        desk.time += 10
    assert all(isinstance(desk.intake.take(data), Statement) for data in claims)


def test_dates_back_and_forth_earn_a_node_no_more_claims() -> None:
    desk = Desk()
    taken = 0
    for sequence in range(100):
        dated = EPOCH - 100 * (sequence % 2)
        data = signed_report(ALICE, replace(REPORT, sequence=sequence), dated)
        taken += isinstance(desk.intake.take(data), Statement)
    assert taken <= 2 * BURST_CLAIMS


def test_the_memory_of_speakers_is_bounded() -> None:
    desk = Desk()
    first = desk.say(ALICE, 1)
    desk.intake.take(first)
    speaker = desk.intake._speakers[ALICE.node_id]
    for number in range(MAX_SPEAKERS - 1):
        desk.intake._speakers[identity_of(0).node_id + str(number)] = speaker  # type: ignore[index]
    desk.intake.take(desk.say(BOB, 1))
    assert len(desk.intake._speakers) == MAX_SPEAKERS
    assert ALICE.node_id not in desk.intake._speakers


@pytest.mark.parametrize("offset", [DAY, -DAY])
def test_a_wrong_clock_of_this_computer_is_noticed(offset: float) -> None:
    desk = Desk(time=EPOCH - offset)
    for number in range(2):
        desk.intake.take(signed_report(identity_of(10 + number), REPORT, EPOCH))
    assert desk.intake.clock_skew.offset_seconds is None  # two may be wrong
    forged = altered(signed_payload(identity_of(20), REPORT), with_steps(1))
    assert desk.reason(forged) is ScoreReason.BAD_SIGNATURE
    assert desk.intake.clock_skew.offset_seconds is None  # and a forger is no witness
    desk.intake.take(signed_report(identity_of(12), REPORT, EPOCH))
    assert desk.intake.clock_skew.offset_seconds == offset
    for number in range(4):  # others whose clocks agree with this one outvote them
        desk.intake.take(signed_report(identity_of(30 + number), replace(REPORT, sequence=1), EPOCH - offset))
    assert desk.intake.clock_skew.offset_seconds is None


@pytest.mark.parametrize(("witnesses", "differs"), [(1, "the other node's clock differ"), (2, "nodes' clocks differ")])
def test_one_or_two_others_that_disagree_leave_open_whose_clock_is_wrong(witnesses: int, differs: str) -> None:
    desk = Desk(time=EPOCH - 720)
    for number in range(witnesses):
        desk.intake.take(signed_report(identity_of(10 + number), REPORT, EPOCH))
    told = desk.intake.clock_skew.warning
    assert told is not None
    assert f"{differs} by 12 minutes" in told
    assert told.endswith("so they refuse each other's reports. Set the clock that is wrong.")
    desk.intake.take(signed_report(identity_of(10), replace(REPORT, sequence=1), EPOCH - 720))  # it has been set
    assert desk.intake.clock_skew.warning is None


def test_few_witnesses_are_kept() -> None:
    desk = Desk()
    for number in range(CLOCK_WITNESSES + 10):
        desk.intake.take(signed_report(identity_of(100 + number), REPORT, EPOCH))
    assert len(desk.intake.clock_skew._noted) == CLOCK_WITNESSES


def test_a_witness_counts_for_a_while_and_not_after_this_clock_was_set() -> None:
    desk = Desk(time=EPOCH - 720)
    desk.intake.take(signed_report(identity_of(10), REPORT, EPOCH))
    assert desk.intake.clock_skew.warning is not None
    desk.time += WITNESS_SECONDS - 1
    assert desk.intake.clock_skew.warning is not None
    desk.time += 2
    assert desk.intake.clock_skew.warning is None
    desk.time = EPOCH - DAY
    assert desk.intake.clock_skew.warning is None


def test_announcements_may_be_repeated_but_not_made_for_others() -> None:
    intake: ClaimIntake[Announcement] = ClaimIntake(ANNOUNCEMENT_RULES, RUN, lambda: EPOCH)
    data = signed_announcement(ALICE, announcement_of(ALICE), EPOCH)
    for _ in range(20):
        assert isinstance(intake.take(data), Statement)
    foreign = signed_announcement(ALICE, announcement_of(BOB), EPOCH)  # with another node's addresses
    refusal = intake.take(foreign)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is ScoreReason.MALFORMED_CLAIM
    old = signed_announcement(ALICE, announcement_of(ALICE), EPOCH - DAY)
    assert isinstance(intake.take(old), Refusal)
    assert intake.refused == {"malformed_claim": 1, "expired_claim": 1}


def test_a_fresh_announcement_shows_a_clock_and_a_record_of_the_directory_does_not() -> None:
    intake = ClaimIntake(ANNOUNCEMENT_RULES, RUN, lambda: EPOCH)
    record = signed_announcement(ALICE, announcement_of(ALICE), EPOCH - 1800)
    assert isinstance(intake.take(record), Statement)
    assert intake.clock_skew.warning is None
    greeting = signed_announcement(BOB, announcement_of(BOB), EPOCH + 1800)
    assert isinstance(intake.take(greeting, BOB.node_id), Refusal)
    assert "differ by 30 minutes" in (intake.clock_skew.warning or "")


def test_who_may_not_take_part_does_not_show_a_clock() -> None:
    owner = Wallet.from_secret(TokenSecret("hex", (2).to_bytes(32, "big")))
    assert owner.wallet_id == ALICE.wallet_id
    members = RunMembers(PassRegister(RUN, owner.public_key), BOB, None, lambda: EPOCH)
    intake = ClaimIntake(ANNOUNCEMENT_RULES, RUN, lambda: EPOCH, members=members)
    for number in range(3):
        stranger = identity_of(20 + number)
        greeting = signed_announcement(stranger, announcement_of(stranger), EPOCH + DAY)
        assert isinstance(intake.take(greeting, stranger.node_id), Refusal)
    assert intake.clock_skew.warning is None
    intake.take(signed_announcement(ALICE, announcement_of(ALICE), EPOCH + DAY), ALICE.node_id)  # the owner's node
    assert "differ by 24 hours" in (intake.clock_skew.warning or "")


def test_reports_without_a_pass_that_keep_coming_are_a_reason_to_greet_the_peers_again() -> None:
    """The members that pass them on know a pass that this node does not know. Free names cause a bounded number."""
    time = EPOCH
    members = RunMembers(PassRegister(RUN, ALICE.delegation.grant.wallet_public_key), BOB, None, lambda: time)

    def reported(number: int) -> int:
        one = identity_of(number)
        assert members.introduce(one.node_id, one.wallet_id, EPOCH + DAY)
        return members.news

    assert reported(20) == 0  # its pass may be under way
    time += PASS_SECONDS + 1
    assert [reported(20) for _ in range(3)] == [1, 1, 1]
    for number in range(30, 30 + 2 * MOST_UNKNOWN):
        reported(number)
    time += PASS_SECONDS + 1
    for number in range(30, 30 + 2 * MOST_UNKNOWN):
        reported(number)
    assert members.news == MOST_UNKNOWN


def test_ten_thousand_nodes_without_a_pass_close_the_run_to_no_member() -> None:
    members = RunMembers(PassRegister(RUN, ALICE.delegation.grant.wallet_public_key), BOB, None, lambda: EPOCH)
    old, new = NodeId("owner's old node"), NodeId("owner's new node")
    assert members.introduce(old, ALICE.wallet_id, EPOCH + DAY) == ""
    stranger = identity_of(20).wallet_id
    for number in range(10_000):
        assert members.introduce(NodeId(f"free {number}"), stranger, EPOCH + DAY)
    assert members.introduce(new, ALICE.wallet_id, EPOCH + DAY) == ""
    assert (members.refusal(old), members.refusal(new)) == ("", "")
    assert "has not shown a pass" in members.refusal(NodeId("free 0"))  # forgotten
    assert members.refusal(NodeId("free 9999"))
    assert len(members.refused_nodes()) == MAX_NODES
