"""The reputation of peers: scores change for stated reasons, decay to neutral and lead to bans.

`Reputation` is the only place where scores change. Every part that talks to peers reports to it and queries it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from types import MappingProxyType

from neuroshard.types import DAY_SECONDS, NodeId
from neuroshard.waiting import Signal

BAN_BELOW = -100.0
LOWEST_SCORE = -200.0
HALF_LIFE_SECONDS = 600.0
FIRST_BAN_SECONDS = 600.0  # at least one half-life, so that a score after a ban never causes the next ban at once
LONGEST_BAN_SECONDS = DAY_SECONDS
BANS_EXPIRE_SECONDS = DAY_SECONDS  # after this time without a ban, the next one is short again
NEUTRAL_WITHIN = 0.5  # a score closer to 0 than this is 0
MAX_PEERS = 4096


class ScoreReason(StrEnum):
    """Why a score changes."""

    MALFORMED_FRAME = "malformed_frame"
    OVERSIZED = "oversized"
    DIGEST_MISMATCH = "digest_mismatch"
    UNEXPECTED_TENSOR = "unexpected_tensor"
    BAD_SIGNATURE = "bad_signature"
    MALFORMED_CLAIM = "malformed_claim"
    FOREIGN_CLAIM = "foreign_claim"
    EXPIRED_CLAIM = "expired_claim"
    REPLAYED_CLAIM = "replayed_claim"
    BAD_RECORD = "bad_record"
    REFUSED_GOSSIP = "refused_gossip"
    FALSE_REPORT = "false_report"
    BROKEN_WORD = "broken_word"
    FLOOD = "flood"
    TOO_SLOW = "too_slow"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    STRANGER = "stranger"
    GOOD_ANSWER = "good_answer"


@dataclass(frozen=True)
class ScoreRule:
    """The weight of one event, the limit that such events alone can reach, and a sentence for people."""

    weight: float
    limit: float  # events of this kind never move a score beyond it
    sentence: str  # continues "This peer"


RULES: Mapping[ScoreReason, ScoreRule] = MappingProxyType(
    {
        ScoreReason.MALFORMED_FRAME: ScoreRule(-25, LOWEST_SCORE, "It sent bytes that are not a frame."),
        ScoreReason.OVERSIZED: ScoreRule(-25, LOWEST_SCORE, "It announced more bytes than its message may contain."),
        ScoreReason.DIGEST_MISMATCH: ScoreRule(-20, LOWEST_SCORE, "It sent data that does not match its digest."),
        ScoreReason.UNEXPECTED_TENSOR: ScoreRule(-25, LOWEST_SCORE, "It sent tensors that were not requested."),
        ScoreReason.BAD_SIGNATURE: ScoreRule(-50, LOWEST_SCORE, "It passed on a claim with a forged signature."),
        ScoreReason.MALFORMED_CLAIM: ScoreRule(-25, LOWEST_SCORE, "It passed on a claim that cannot be read."),
        ScoreReason.FOREIGN_CLAIM: ScoreRule(-10, LOWEST_SCORE, "It passed on a claim of another run or node."),
        # a wrong clock is not an offence, and it may be this computer's own
        ScoreReason.EXPIRED_CLAIM: ScoreRule(-2, -50, "It passed on a claim that is too old or dated in the future."),
        ScoreReason.REPLAYED_CLAIM: ScoreRule(-5, LOWEST_SCORE, "It repeated a claim that was made before."),
        ScoreReason.BAD_RECORD: ScoreRule(-20, LOWEST_SCORE, "It stored a record under a name that is not its own."),
        # peers judge by their own state: a late message may be refused here and accepted there
        ScoreReason.REFUSED_GOSSIP: ScoreRule(-2, -50, "It passed on gossip that was refused."),
        ScoreReason.FALSE_REPORT: ScoreRule(-30, LOWEST_SCORE, "It did not hold the layers that it reported."),
        ScoreReason.BROKEN_WORD: ScoreRule(-40, LOWEST_SCORE, "It did not keep its commitment in a round."),
        ScoreReason.FLOOD: ScoreRule(-20, LOWEST_SCORE, "It sends far more than its limit."),
        ScoreReason.TOO_SLOW: ScoreRule(-10, -80, "It sent so slowly that it was cut off."),
        # neither can lead to a ban: a peer with a bad connection does no harm
        ScoreReason.TIMEOUT: ScoreRule(-4, -60, "It did not answer in time."),
        ScoreReason.UNREACHABLE: ScoreRule(-2, -60, "It could not be reached."),
        # a newcomer may ask before its announcement has arrived here
        ScoreReason.STRANGER: ScoreRule(-1, -20, "It asked for data that only members of the run may have."),
        ScoreReason.GOOD_ANSWER: ScoreRule(1, 20, "It answered well."),
    }
)


@dataclass(frozen=True)
class PeerScore:
    """One peer's score at the time of its last change."""

    score: float = 0.0
    updated_at: float = 0.0  # seconds of the caller's clock, as all times here
    banned_until: float = -inf
    bans: int = 0

    def at(self, now: float) -> float:
        """The score at `now`: half of it decays every HALF_LIFE_SECONDS, and close to 0 it is 0."""
        faded = self.score * 0.5 ** (max(0.0, now - self.updated_at) / HALF_LIFE_SECONDS)
        return faded if abs(faded) >= NEUTRAL_WITHIN else 0.0

    def is_banned(self, now: float) -> bool:
        return now < self.banned_until

    def is_forgotten(self, now: float) -> bool:
        """Whether this entry no longer differs from that of a stranger."""
        return self.at(now) == 0.0 and (self.bans == 0 or now >= self.banned_until + BANS_EXPIRE_SECONDS)

    def after(self, rule: ScoreRule, now: float) -> PeerScore:
        """The score after one event. While a peer is banned nothing changes."""
        if self.is_banned(now):
            return self
        score = _moved(self.at(now), rule)
        changed = replace(self, score=score, updated_at=max(now, self.updated_at))
        return changed._banned(now) if score < BAN_BELOW and rule.weight < 0 else changed

    def _banned(self, now: float) -> PeerScore:
        bans = 0 if now >= self.banned_until + BANS_EXPIRE_SECONDS else self.bans
        seconds = min(FIRST_BAN_SECONDS * 2.0 ** min(bans, 32), LONGEST_BAN_SECONDS)
        return replace(self, banned_until=now + seconds, bans=bans + 1)


def _moved(score: float, rule: ScoreRule) -> float:
    """Add the weight to `score` up to the rule's limit. A score already beyond the limit stays."""
    if rule.weight >= 0:
        return max(score, min(score + rule.weight, rule.limit))
    return min(score, max(score + rule.weight, rule.limit))


@dataclass(frozen=True)
class PeerScores:
    """The scores of all peers that are not neutral, at most `capacity`."""

    entries: Mapping[NodeId, PeerScore] = field(default_factory=dict[NodeId, PeerScore])  # least recently changed first
    capacity: int = MAX_PEERS

    def report(self, peer: NodeId, reason: ScoreReason, now: float) -> PeerScores:
        """The scores after one event."""
        before = self.entries.get(peer, PeerScore())
        after = before.after(RULES[reason], now)
        if after is before:
            return self
        entries = dict(self.entries)
        entries.pop(peer, None)
        if len(entries) >= self.capacity:
            del entries[_least_needed(entries, now)]
        entries[peer] = after
        return replace(self, entries=entries)

    def score(self, peer: NodeId, now: float) -> float:
        """0 is neutral, LOWEST_SCORE the worst."""
        entry = self.entries.get(peer)
        return 0.0 if entry is None else entry.at(now)

    def is_banned(self, peer: NodeId, now: float) -> bool:
        entry = self.entries.get(peer)
        return entry is not None and entry.is_banned(now)

    def banned(self, now: float) -> tuple[NodeId, ...]:
        return tuple(node for node, entry in self.entries.items() if entry.is_banned(now))


def _least_needed(entries: Mapping[NodeId, PeerScore], now: float) -> NodeId:
    """The peer whose entry is dropped first: neutral ones, then the longest unchanged one that is not banned.

    If all are banned, it is the one whose ban ends first, so that strangers cannot displace bans with new names.
    """
    unbanned: NodeId | None = None
    for node, entry in entries.items():
        if entry.is_forgotten(now):
            return node
        if unbanned is None and not entry.is_banned(now):
            unbanned = node
    return unbanned or min(entries, key=lambda node: entries[node].banned_until)


class Reputation:
    """This node's scores of its peers. Belongs to one event loop; `now` is any monotonic clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic, scores: PeerScores | None = None) -> None:
        self._now = now
        self._scores = scores or PeerScores()
        self._counts: Counter[ScoreReason] = Counter()
        self.banned = Signal()  # a peer was banned

    def report(self, peer: NodeId, reason: ScoreReason) -> None:
        """Count one event of a peer."""
        was_banned = self.is_banned(peer)
        self._counts[reason] += 1
        self._scores = self._scores.report(peer, reason, self._now())
        if not was_banned and self.is_banned(peer):
            self.banned.notify()

    def score(self, peer: NodeId) -> float:
        """0 is neutral; a lower score means that the peer misbehaved."""
        return self._scores.score(peer, self._now())

    def is_banned(self, peer: NodeId) -> bool:
        # called for every message: most peers have no entry, and then the time does not matter
        return peer in self._scores.entries and self._scores.is_banned(peer, self._now())

    def banned_peers(self) -> tuple[NodeId, ...]:
        return self._scores.banned(self._now())

    @property
    def scores(self) -> PeerScores:
        """All scores as a value."""
        return self._scores

    def refused(self) -> tuple[tuple[str, int], ...]:
        """How often each reason with a negative weight was reported, for the status."""
        bad = ((reason, count) for reason, count in self._counts.items() if RULES[reason].weight < 0)
        return tuple(sorted((reason.value, count) for reason, count in bad))
