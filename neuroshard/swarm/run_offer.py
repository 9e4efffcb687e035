"""What a node that knows a run gives to one that wants to join: the parameters it began with and those that hold now.

The first prove the run's id, the owner's signature under both proves the second; so it does not matter who hands them
over. Pure: reading, checking and choosing, no sockets and no files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from neuroshard.config.run_parameters import RunParameters
from neuroshard.errors import DataError
from neuroshard.identity import SignedRunParameters, canonical_json, parse_json, run_id
from neuroshard.identity.fields import exact_object
from neuroshard.types import JsonValue, RunId, WalletId

MAX_OFFER_BYTES = 48 * 1024  # fits into the header of a frame; the largest parameters there can be take a third of it

# What a later version may change. Everything else is part of what the run is.
MAY_CHANGE = frozenset(
    {
        "version",
        "holds_from_outer_step",
        "seeds",
        "inner.learning_rate",
        "inner.warmup_steps",
        "inner.decay_steps",
        "inner.final_fraction",
        "outer.learning_rate",
        "outer.momentum",
        "outer.lone_outer",
        "outer.aggregator",
        "outer.trim_fraction",
        "outer.codec",
        "outer.max_round_seconds",
    }
)


class RunOfferError(DataError):
    """An offer that is malformed, of another run, or not what the run's owner may do."""


@dataclass(frozen=True)
class RunOffer:
    """A run: its initial parameters and the current ones, both signed by the owner."""

    initial: SignedRunParameters
    current: SignedRunParameters

    @classmethod
    def of_new_run(cls, signed: SignedRunParameters) -> RunOffer:
        """The offer of a run that has only its first version."""
        return cls(signed, signed)

    @property
    def run_id(self) -> RunId:
        """SHA-256(owner key, initial parameters), 64 hex digits."""
        return run_id(self.initial.owner_public_key, self.initial.parameters)

    @property
    def owner(self) -> WalletId:
        """The wallet that signed both."""
        return self.initial.owner_wallet_id

    @property
    def parameters(self) -> RunParameters:
        """The current parameters."""
        return self.current.parameters

    def to_value(self) -> Mapping[str, JsonValue]:
        """The JSON object; the run id in it is for readers, `read_offer` computes it again."""
        return {"run_id": self.run_id, "initial": self.initial.to_value(), "current": self.current.to_value()}

    def to_json(self) -> bytes:
        """`to_value` as canonical JSON, at most MAX_OFFER_BYTES."""
        return canonical_json(self.to_value())


@dataclass(frozen=True)
class OfferChoice:
    """Which of two offers of a run holds, and why the other does not when that is worth a word."""

    offer: RunOffer
    is_new: bool  # the offered one took the place of the one held
    reason: str = ""


def checked_offer(expected: RunId, data: bytes) -> RunOffer:
    """The offer of one run, whoever sent it.

    Raises RunOfferError, RunParametersError or SignatureError, all of them DataErrors that say what is wrong.
    """
    offer = read_offer(data)
    if offer.run_id != expected:
        raise RunOfferError(f"An offer is of run {offer.run_id[:16]}, expected {expected[:16]}.")
    return offer


def read_offer(data: bytes) -> RunOffer:
    """The offer of any run, verified: id, signatures, one owner, allowed changes only. Raises as checked_offer."""
    try:
        fields = exact_object(parse_json(data, MAX_OFFER_BYTES), {"run_id", "initial", "current"}, "run offer")
    except ValueError as error:
        raise RunOfferError(f"An offer of a run cannot be read: {error}.") from None
    initial = SignedRunParameters.from_value(fields["initial"])
    current = initial
    if fields["current"] != fields["initial"]:
        current = SignedRunParameters.from_value(fields["current"])
    offer = RunOffer(initial, current)
    if fields["run_id"] != offer.run_id:
        raise RunOfferError("An offer names another run id than its initial parameters lead to.")
    check_succession(initial, current)
    return offer


def check_succession(initial: SignedRunParameters, current: SignedRunParameters) -> None:
    """Raises RunOfferError unless `current` is what the owner of a run may make of its initial parameters."""
    if initial.parameters.holds_from_outer_step != 0:
        raise RunOfferError("The initial parameters of a run must hold from outer step 0.")
    if current.owner_public_key != initial.owner_public_key:
        raise RunOfferError(
            f"The current parameters of a run of wallet {initial.owner_wallet_id} are signed by another wallet, "
            f"{current.owner_wallet_id}."
        )
    versions = f"version {current.parameters.version} after version {initial.parameters.version}"
    changed = changed_fields(initial.parameters, current.parameters)
    if current.parameters.version < initial.parameters.version:
        raise RunOfferError(f"A run goes on with {versions}: an older one counts for nothing.")
    if changed and current.parameters.version == initial.parameters.version:
        raise RunOfferError(f"A run goes on with {versions}, but {', '.join(changed)} changed.")
    fixed = [name for name in changed if name not in MAY_CHANGE]
    if fixed:
        raise RunOfferError(f"A run goes on with another {', '.join(fixed)}, which no version may change.")


def better_of(held: RunOffer, offered: RunOffer) -> OfferChoice:
    """The higher version of one run; of two that claim the same version, the one held.

    Both must be checked. Raises ValueError when they are of different runs.
    """
    if held.run_id != offered.run_id:
        raise ValueError(f"offers of different runs, {held.run_id[:16]} and {offered.run_id[:16]}")
    held_version, version = held.parameters.version, offered.parameters.version
    if version > held_version:
        return OfferChoice(offered, is_new=True)
    if version < held_version:
        reason = f"Version {version} of run {held.run_id[:16]} is ignored: version {held_version} is known."
        return OfferChoice(held, is_new=False, reason=reason)
    if held.parameters != offered.parameters:
        changed = ", ".join(changed_fields(held.parameters, offered.parameters))
        reason = (
            f"The owner of run {held.run_id[:16]} signed two versions {version} that differ in {changed}: "
            "the one known first stays."
        )
        return OfferChoice(held, is_new=False, reason=reason)
    return OfferChoice(held, is_new=False)


def changed_fields(old: RunParameters, new: RunParameters) -> tuple[str, ...]:
    """Names of the fields that differ, with a dot before those of inner, outer, architecture and genesis; in order."""
    return tuple(_differences(old, new, ""))


def _differences(old: Any, new: Any, prefix: str) -> Iterator[str]:
    for item in dataclasses.fields(old):
        before, after = getattr(old, item.name), getattr(new, item.name)
        if dataclasses.is_dataclass(before):
            yield from _differences(before, after, f"{prefix}{item.name}.")
        elif before != after:
            yield f"{prefix}{item.name}"
