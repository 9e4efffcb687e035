"""Run offers: the initial parameters of a run and every later version, all signed by the owner. Pure.

The initial parameters prove the run id, and the owner's signatures prove the later versions, so an offer from any node
can be trusted. A version applies from the outer step that it names until a higher version applies. A node that joins
at any outer step, or is behind, therefore knows the parameters of every step. No sockets and no files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from neuroshard.config.run_parameters import OuterOptimization, RunParameters
from neuroshard.decoders import read_json
from neuroshard.errors import DataError
from neuroshard.identity import SignedForm, SignedRunParameters, canonical_json, run_id
from neuroshard.identity.invitations import PassBytes
from neuroshard.types import HexDigest, NamedRun, NamedWallet, RunId, WalletId

MAX_OFFER_BYTES = 48 * 1024  # fits into the header of a frame; about 30 usual versions, or three of the largest
# Fields that a later version may change. All others define the run itself; seeds only say where its nodes are.
MAY_CHANGE = frozenset(
    {
        "version",
        "holds_from_outer_step",
        "seeds",
        "authority",
        "successor",
        "sequences_per_step",
        "inner.learning_rate",
        "inner.schedule",
        "inner.warmup_steps",
        "inner.decay_steps",
        "inner.final_fraction",
        "inner.max_grad_norm",
        "outer.learning_rate",
        "outer.aggregator",
        "outer.codec",
        "outer.max_round_seconds",
        "outer.strategy",
        "outer.overlap",
        "outer.averaged_sequences",
    }
)

# Why others never change, by field or by the first part of its name.
FIXED_REASONS: Mapping[str, str] = {
    "architecture": "the weights that the nodes keep would not fit another model",
    "subspace_sha256": "the weights that the nodes keep would not fit another subspace",
    "stage_count": "the plan says which layers each node holds",
    "stage_layers": "the plan says which layers each node holds",
    "genesis": "the data decide which text is held out and which was trained on",
    "admission": "it decides how votes count",
    "wire_precision": "a stage refuses tensors in another precision than that of the run",
    "wire_precision_gradients": "a stage refuses tensors in another precision than that of the run",
    "inner.optimizer": "the moments that the nodes keep would not fit another optimizer",
}


class RunRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for the offer of a run."""

    run: HexDigest | None  # None: the run that the asked node shares
    wallet: NamedWallet | None = None  # of the asking node, whose pass is answered if it is known


class RunAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The offer of a run, as its owner signed it."""

    offer: Annotated[bytes, Meta(max_length=MAX_OFFER_BYTES)]
    member_pass: PassBytes | None = None  # that the wallet has shown


class RunNews(Struct, frozen=True, forbid_unknown_fields=True):
    """The sender has learned something about the run. It carries nothing: who wants to know it asks the sender."""

    run: HexDigest


class NewsHeard(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to `RunNews`."""


class OfferForm(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """JSON form of an offer."""

    run_id: NamedRun  # informative only: readers compute it again
    initial: SignedForm
    current: SignedForm
    between: tuple[SignedForm, ...] = ()


class RunOfferError(DataError):
    """An offer is malformed, belongs to another run, or makes a change that the run's owner may not make."""


@dataclass(frozen=True)
class RunOffer:
    """A run: its initial parameters and the versions after them, all signed by the owner."""

    initial: SignedRunParameters
    current: SignedRunParameters  # the newest version; the initial one while there is no other
    between: tuple[SignedRunParameters, ...] = ()  # versions that apply before the newest does, in order

    @classmethod
    def of_new_run(cls, signed: SignedRunParameters) -> RunOffer:
        """The offer of a run that has only its first version."""
        return cls(signed, signed)

    @cached_property
    def run_id(self) -> RunId:
        """SHA-256(owner key, initial parameters) as 64 hex digits. It is cached: every handshake and report uses it."""
        return run_id(self.initial.owner_public_key, self.initial.parameters)

    @property
    def owner(self) -> WalletId:
        """The wallet that signed all versions."""
        return self.initial.owner_wallet_id

    @property
    def parameters(self) -> RunParameters:
        """The newest parameters, even if they do not apply yet: use them for fixed fields and for the seeds."""
        return self.current.parameters

    @property
    def data_run_id(self) -> RunId:
        """The run whose id divides the data into held-out text and the parts of nodes. A branch keeps the division."""
        branch = self.parameters.branch
        return self.run_id if branch is None else RunId(branch.data_run_id)

    @property
    def versions(self) -> tuple[SignedRunParameters, ...]:
        """All signed versions, the lowest number first."""
        later = () if self.current.parameters == self.initial.parameters else (*self.between, self.current)
        return (self.initial, *later)

    def parameters_at(self, outer_step: int) -> RunParameters:
        """Parameters for the inner steps after `outer_step` outer steps, and for the round that ends those steps."""
        known = (signed.parameters for signed in self.versions)
        return max((each for each in known if each.holds_from_outer_step <= outer_step), key=lambda each: each.version)

    def with_version(self, signed: SignedRunParameters) -> RunOffer:
        """Add a version. It replaces the versions that would apply only from the same or a later outer step."""
        return _joined((*self.versions, signed))

    @property
    def form(self) -> OfferForm:
        """The JSON form."""
        between = tuple(signed.form for signed in self.between)
        return OfferForm(self.run_id, self.initial.form, self.current.form, between)

    def to_json(self) -> bytes:
        """Encode `form` as canonical JSON. Readers reject more than MAX_OFFER_BYTES."""
        return self._json

    @cached_property
    def _json(self) -> bytes:
        """Encoded once: a node sends it to every peer that asks and compares it with every peer's answer."""
        return canonical_json(msgspec.to_builtins(self.form))


@dataclass(frozen=True)
class OfferChoice:
    """The offer that applies after comparing two of one run, and the reason against the other, if any."""

    offer: RunOffer
    is_new: bool  # the offered one added a version to the one held
    reason: str = ""


def checked_offer(expected: RunId, data: bytes) -> RunOffer:
    """Parse and verify the offer of one run from any sender.

    Raises RunOfferError, RunParametersError or SignatureError, all of them DataErrors that name the defect.
    """
    return offer_of(expected, _form_in(data))


def read_offer(data: bytes) -> RunOffer:
    """Parse an offer of any run and verify its id, signatures, owner and changes. Raises like `checked_offer`."""
    return _verified(_form_in(data))


def offer_of(expected: RunId, form: OfferForm) -> RunOffer:
    """Verify the JSON form of an offer of one run. Raises like `checked_offer`."""
    if form.run_id != expected:
        raise RunOfferError(f"An offer is of run {form.run_id[:16]}, expected {expected[:16]}.")
    return _verified(form)


def _form_in(data: bytes) -> OfferForm:
    try:
        return read_json(data, OfferForm, MAX_OFFER_BYTES)
    except ValueError as error:
        raise RunOfferError(f"An offer of a run cannot be read: {error}.") from None


def _verified(form: OfferForm) -> RunOffer:
    initial = SignedRunParameters.from_form(form.initial)
    current = initial if form.current == form.initial else SignedRunParameters.from_form(form.current)
    offer = RunOffer(initial, current, tuple(map(SignedRunParameters.from_form, form.between)))
    if form.run_id != offer.run_id:
        raise RunOfferError("An offer names another run id than its initial parameters lead to.")
    for signed in (current, *offer.between):
        check_succession(initial, signed)
    if offer != _joined((initial, *offer.between, current)):
        raise RunOfferError("The versions in an offer must each hold after the one before, from a later outer step.")
    return offer


def check_succession(initial: SignedRunParameters, current: SignedRunParameters) -> None:
    """Raises RunOfferError unless the owner may replace `initial` by `current`: same owner, allowed fields only."""
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
        raise RunOfferError(f"A run continues with {versions}, not with an older one.")
    if changed and current.parameters.version == initial.parameters.version:
        raise RunOfferError(f"A run continues with {versions}, but {', '.join(changed)} changed without one.")
    fixed = [name for name in changed if name not in MAY_CHANGE]
    if fixed:
        raise RunOfferError(
            f"The newer version changes {', '.join(fixed)}, which no version may change{reason_against(fixed)}."
        )
    before, after = (_kept_beside(signed.parameters.outer) for signed in (initial, current))
    if before != after:
        raise RunOfferError(
            f"The newer version changes {before} to {after}: the state with the replicas' weights would not fit."
        )


def reason_against(fixed: Iterable[str]) -> str:
    """The reason why one of these fields never changes, after a colon; "" if none is known."""
    reasons = (FIXED_REASONS.get(name) or FIXED_REASONS.get(name.split(".", maxsplit=1)[0]) for name in fixed)
    found = next(filter(None, reasons), "")
    return f": {found}" if found else ""


def _kept_beside(outer: OuterOptimization) -> str:
    """Name the outer state that replicas keep in addition to the weights. No version may change its kind."""
    return "averaged gradients" if outer.strategy == "averaging" else "rounds of trained weights"


def continues(following: RunOffer, offer: RunOffer) -> bool:
    """Whether a run begins with states of another one of the same owner. Its id depends on the other: no circle."""
    branch = following.initial.parameters.branch
    is_same = following.initial.owner_public_key == offer.initial.owner_public_key
    return branch is not None and branch.run_id == offer.run_id and is_same


def last_successor(offer: RunOffer, find: Callable[[RunId], RunOffer | None]) -> RunOffer:
    """The run with which the owner continues a run, or the last one that `find` knows; the run itself without any."""
    while offer.parameters.successor:
        following = find(RunId(offer.parameters.successor))
        if following is None or not continues(following, offer):
            break
        offer = following
    return offer


def better_of(held: RunOffer, offered: RunOffer) -> OfferChoice:
    """Merge two checked offers of one run. If both have a version of the same number, the one held stays.

    Raises ValueError if they are of different runs.
    """
    if held.run_id != offered.run_id:
        raise ValueError(f"offers of different runs, {held.run_id[:16]} and {offered.run_id[:16]}")
    both = _joined((*held.versions, *offered.versions))
    if both != held and len(both.to_json()) <= MAX_OFFER_BYTES:
        return OfferChoice(both, is_new=True)
    return OfferChoice(held, is_new=False, reason=_why_not(held, offered))


def _why_not(held: RunOffer, offered: RunOffer) -> str:
    """The reason why an offer adds nothing, or "" if it is an older copy that needs no message."""
    known = {signed.parameters.version: signed.parameters for signed in held.versions}
    for signed in offered.versions:
        version = signed.parameters.version
        changed = changed_fields(known.get(version, signed.parameters), signed.parameters)
        if changed:
            return (
                f"The owner of run {held.run_id[:16]} signed two versions {version} that differ in "
                f"{', '.join(changed)}: the one known first stays."
            )
    held_version, version = held.parameters.version, offered.parameters.version
    if version < held_version:
        return f"Version {version} of run {held.run_id[:16]} is ignored: version {held_version} is known."
    if version > held_version:
        return f"Run {held.run_id[:16]} has more versions than an offer may carry: version {version} is ignored."
    return ""


def _joined(versions: Iterable[SignedRunParameters]) -> RunOffer:
    """Build an offer from versions that include the initial one. For equal numbers the first one wins.

    A version that a higher one replaces before it applies is left out: it never applies.
    """
    by_number: dict[int, SignedRunParameters] = {}
    for signed in versions:
        by_number.setdefault(signed.parameters.version, signed)
    initial, *later = (by_number[number] for number in sorted(by_number))
    holding: list[SignedRunParameters] = []
    # From the highest number down: a version ever applies only if it starts before all higher versions.
    for signed in reversed(later):
        if not holding or signed.parameters.holds_from_outer_step < holding[0].parameters.holds_from_outer_step:
            holding.insert(0, signed)
    return RunOffer(initial, holding[-1] if holding else initial, tuple(holding[:-1]))


def changed_fields(old: RunParameters, new: RunParameters) -> tuple[str, ...]:
    """Names of the fields that differ, in order of declaration; nested ones are dotted, such as `outer.codec`."""
    return tuple(_differences(old, new, ""))


def _differences(old: Any, new: Any, prefix: str) -> Iterator[str]:
    for item in dataclasses.fields(old):
        before, after = getattr(old, item.name), getattr(new, item.name)
        if dataclasses.is_dataclass(before) and type(after) is type(before):
            yield from _differences(before, after, f"{prefix}{item.name}.")
        elif before != after:
            yield f"{prefix}{item.name}"
