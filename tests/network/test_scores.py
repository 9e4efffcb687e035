from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neuroshard.network import PeerScores, Reputation, ScoreReason
from neuroshard.network.reputation import (
    BAN_BELOW,
    BANS_EXPIRE_SECONDS,
    FIRST_BAN_SECONDS,
    HALF_LIFE_SECONDS,
    LONGEST_BAN_SECONDS,
    LOWEST_SCORE,
    RULES,
)
from neuroshard.types import NodeId

PEER, OTHER = NodeId("peer"), NodeId("other")
REASONS = st.sampled_from(ScoreReason)
ERRORS = st.sampled_from([reason for reason in ScoreReason if RULES[reason].weight < 0])
HARMLESS = [reason for reason in ScoreReason if 0 > RULES[reason].limit > BAN_BELOW]
GAPS = st.floats(0, 4 * HALF_LIFE_SECONDS)
EVENTS = st.lists(st.tuples(REASONS, GAPS), max_size=80)


def flooded(scores: PeerScores, now: float, peer: NodeId = PEER) -> PeerScores:
    """The scores at the moment when a flood led to a ban."""
    for _ in range(20):
        scores = scores.report(peer, ScoreReason.FLOOD, now)
        if scores.is_banned(peer, now):
            return scores
    raise AssertionError("20 events of a flood did not ban")


def test_every_reason_has_a_weight_and_one_sentence_for_people() -> None:
    assert set(RULES) == set(ScoreReason)
    for rule in RULES.values():
        assert rule.weight != 0
        assert (rule.weight > 0) == (rule.limit > 0)
        assert rule.sentence.startswith("It ")
        assert rule.sentence.count(".") == 1
        assert rule.sentence.endswith(".")
    assert len({rule.sentence for rule in RULES.values()}) == len(RULES)


@given(st.lists(ERRORS, max_size=60), st.integers(0, 5))
def test_a_peer_that_errs_rarely_is_never_banned(errors: list[ScoreReason], answers: int) -> None:
    scores, now = PeerScores(), 0.0
    for error in errors:
        scores = scores.report(PEER, error, now)
        assert not scores.is_banned(PEER, now)
        for _ in range(answers):
            scores = scores.report(PEER, ScoreReason.GOOD_ANSWER, now)
        now += HALF_LIFE_SECONDS


@given(st.lists(st.sampled_from(HARMLESS), min_size=100, max_size=300))
def test_being_slow_late_or_out_of_reach_alone_never_bans(errors: list[ScoreReason]) -> None:
    scores = PeerScores()
    for error in errors:
        scores = scores.report(PEER, error, 0.0)
    assert not scores.is_banned(PEER, 0.0)
    assert scores.score(PEER, 0.0) < -40


@given(EVENTS)
def test_a_flood_is_banned_within_seconds_whatever_went_before(history: list[tuple[ScoreReason, float]]) -> None:
    scores, now = PeerScores(), 0.0
    for reason, gap in history:
        scores = scores.report(PEER, reason, now)
        now += gap
    needed = 0
    while not scores.is_banned(PEER, now) and needed < 7:
        scores = scores.report(PEER, ScoreReason.FLOOD, now)
        now += 1.0
        needed += 1
    assert scores.is_banned(PEER, now)


@given(EVENTS)
def test_scores_stay_in_bounds_and_return_to_zero(events: list[tuple[ScoreReason, float]]) -> None:
    scores, now = PeerScores(), 0.0
    for reason, gap in events:
        before = scores.score(PEER, now)
        scores = scores.report(PEER, reason, now)
        after = scores.score(PEER, now)
        limit = RULES[reason].limit
        assert after >= LOWEST_SCORE
        if RULES[reason].weight > 0:
            assert before <= after <= max(before, limit)
        else:
            assert min(before, limit) - 1e-9 <= after <= before + 1e-9
        now += gap
    distances = [abs(scores.score(PEER, now + wait * HALF_LIFE_SECONDS)) for wait in range(12)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] == 0


@given(st.integers(1, 400))
def test_praise_alone_never_lifts_above_its_cap(count: int) -> None:
    scores = PeerScores()
    for _ in range(count):
        scores = scores.report(PEER, ScoreReason.GOOD_ANSWER, 0.0)
    assert scores.score(PEER, 0.0) == min(count, RULES[ScoreReason.GOOD_ANSWER].limit)


def test_bans_double_and_a_long_good_time_is_rewarded() -> None:
    scores, now, lengths = PeerScores(), 0.0, list[float]()
    for _ in range(12):
        scores = flooded(scores, now)
        until = scores.entries[PEER].banned_until
        lengths.append(until - now)
        assert scores.is_banned(PEER, until - 1)
        assert not scores.is_banned(PEER, until)
        now = until
    expected = [min(FIRST_BAN_SECONDS * 2**n, LONGEST_BAN_SECONDS) for n in range(12)]
    assert lengths == expected
    now += BANS_EXPIRE_SECONDS
    assert flooded(scores, now).entries[PEER].banned_until == now + FIRST_BAN_SECONDS


def test_the_end_of_a_ban_is_a_new_chance() -> None:
    scores = flooded(PeerScores(), 0.0)
    for _ in range(50):
        scores = scores.report(PEER, ScoreReason.BAD_SIGNATURE, 1.0)  # counted for nothing while banned
    end = scores.entries[PEER].banned_until
    assert scores.score(PEER, end) > BAN_BELOW
    assert not scores.report(PEER, ScoreReason.TIMEOUT, end).is_banned(PEER, end)


@given(st.lists(st.tuples(st.integers(0, 30), REASONS), max_size=200))
def test_the_table_is_bounded(events: list[tuple[int, ScoreReason]]) -> None:
    scores = PeerScores(capacity=8)
    for number, (node, reason) in enumerate(events):
        scores = scores.report(NodeId(f"node {node}"), reason, float(number))
        assert len(scores.entries) <= 8


def test_new_names_do_not_push_a_ban_out() -> None:
    scores = flooded(PeerScores(capacity=8), 0.0)
    for number in range(100):
        scores = scores.report(NodeId(f"new {number}"), ScoreReason.BAD_SIGNATURE, 1.0)
    assert scores.is_banned(PEER, 1.0)
    assert len(scores.entries) == 8
    full = PeerScores(capacity=2)
    for number in range(3):
        full = flooded(full, float(number), NodeId(f"flood {number}"))
    assert full.banned(3.0) == (NodeId("flood 1"), NodeId("flood 2"))


def test_the_value_before_an_event_stays_as_it_was() -> None:
    before = PeerScores().report(PEER, ScoreReason.TIMEOUT, 0.0)
    after = before.report(PEER, ScoreReason.FLOOD, 0.0).report(OTHER, ScoreReason.FLOOD, 0.0)
    assert before.score(PEER, 0.0) == RULES[ScoreReason.TIMEOUT].weight
    assert set(before.entries) == {PEER}
    assert set(after.entries) == {PEER, OTHER}


def test_a_reputation_counts_reasons_and_follows_its_clock() -> None:
    times = [0.0]
    reputation = Reputation(now=lambda: times[0])
    for _ in range(6):
        reputation.report(PEER, ScoreReason.FLOOD)
    assert reputation.banned.count == 1
    reputation.report(OTHER, ScoreReason.TIMEOUT)
    reputation.report(NodeId("good"), ScoreReason.GOOD_ANSWER)
    assert reputation.is_banned(PEER)
    assert not reputation.is_banned(OTHER)
    assert reputation.banned_peers() == (PEER,)
    assert reputation.refused() == (("flood", 6), ("timeout", 1))
    times[0] = FIRST_BAN_SECONDS
    assert not reputation.is_banned(PEER)
    assert reputation.score(PEER) == -60
    assert reputation.scores.score(OTHER, times[0]) == -2
