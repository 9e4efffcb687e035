"""What can be told of a claim from its bytes alone, whoever brings it: schema and signatures, each checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from neuroshard.errors import DataError
from neuroshard.identity import ClaimTooLargeError, DelegationExpiredError, KnownDelegations, SignedClaim, verify_claim
from neuroshard.network import ScoreReason
from neuroshard.types import JsonValue, NodeId, RunId, WalletId

MAX_CACHED_BYTES = 16 * 1024 * 1024
ENTRY_BYTES = 2048  # of a claim's objects besides its text, which lies there about three times

T = TypeVar("T")


@dataclass(frozen=True)
class Statement(Generic[T]):
    """What a node said under its signature."""

    node_id: NodeId
    wallet_id: WalletId
    issued_at: float  # seconds since the epoch
    delegated_until: float  # seconds since the epoch
    value: T


@dataclass(frozen=True)
class Refusal:
    """Why a claim does not count."""

    explanation: str
    reason: ScoreReason | None  # None: nobody's fault
    culprit: NodeId | None = None  # None: whoever brought it
    is_other_run: bool = False
    is_repetition: bool = False  # heard just before, in the very same bytes


@dataclass(frozen=True)
class ClaimRules(Generic[T]):
    """One kind of claim."""

    domain: str
    decode: Callable[[bytes], SignedClaim]  # raises DataError
    read: Callable[[JsonValue, NodeId], T]  # payload and node; raises ValueError
    run_of: Callable[[T], RunId]
    sequence_of: Callable[[T], int] | None  # must rise from claim to claim of a node; None: may be repeated
    max_bytes: int
    max_age_seconds: float


@dataclass
class _Known(Generic[T]):
    claim: SignedClaim | None  # None once its signatures were checked
    statement: Statement[T]
    forged: Refusal | None = None


class ClaimCache(Generic[T]):
    """Remembers what was read, so that the many copies of a claim are parsed and verified once. Bounded."""

    def __init__(self, rules: ClaimRules[T], max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._rules = rules
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: dict[bytes, _Known[T] | Refusal] = {}
        self._delegations = KnownDelegations()
        self.verifications = 0

    def read(self, data: bytes) -> Statement[T] | Refusal:
        """The statement in a claim whose signatures may still be false, or why there is none."""
        known = self._known.get(data)
        if known is None:
            known = self._parse(data)
            self._bytes += _memory_of(data)
            while self._known and self._bytes > self._max_bytes:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._bytes -= _memory_of(oldest)
            self._known[data] = known
        return known if isinstance(known, Refusal) else known.statement

    def authenticity(self, data: bytes) -> Refusal | None:
        """Why the signatures of a claim that was read do not hold; None when they do."""
        known = self._known[data]
        if isinstance(known, Refusal):
            return known
        if known.claim is not None:
            self.verifications += 1
            known.forged = _forgery(known.claim, self._rules.domain, self._delegations)
            known.claim = None
        return known.forged

    def _parse(self, data: bytes) -> _Known[T] | Refusal:
        try:
            claim = self._rules.decode(data)
            if claim.domain != self._rules.domain:
                text = f"A claim is about {claim.domain!r}, expected {self._rules.domain!r}."
                return Refusal(text, ScoreReason.FOREIGN_CLAIM)
            node_id = claim.delegation.node_id
            value = self._rules.read(claim.payload, node_id)
        except ClaimTooLargeError as error:
            return Refusal(str(error), ScoreReason.OVERSIZED)
        except (DataError, ValueError) as error:
            return Refusal(f"A claim cannot be read: {error}", ScoreReason.MALFORMED_CLAIM)
        delegation = claim.delegation
        statement = Statement(node_id, delegation.wallet_id, claim.issued_at, delegation.expires_at, value)
        return _Known(claim, statement)


def _memory_of(data: bytes) -> int:
    """What a claim that was read takes, rather more than less."""
    return ENTRY_BYTES + 3 * len(data)


def _forgery(claim: SignedClaim, domain: str, delegations: KnownDelegations) -> Refusal | None:
    """What is false about a claim at the very time at which it says it was made."""
    try:
        verify_claim(claim, domain, now=claim.issued_at, known=delegations)
    except DelegationExpiredError as error:
        return Refusal(str(error), ScoreReason.EXPIRED_CLAIM)
    except DataError as error:
        return Refusal(str(error), ScoreReason.BAD_SIGNATURE)
    return None
