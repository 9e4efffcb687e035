"""Runs that this computer stores: its local run, proposed once and signed by the wallet, and joined runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.config.state_file import StateFile, read_bounded
from neuroshard.errors import DataError, StorageError, UsageError
from neuroshard.identity import SignedForm, SignedRunParameters, Wallet, hash_parts
from neuroshard.runs.offer import (
    MAX_OFFER_BYTES,
    OfferChoice,
    OfferForm,
    RunOffer,
    RunOfferError,
    better_of,
    last_successor,
    offer_of,
    read_offer,
)
from neuroshard.types import RunId

_LOG = logging.getLogger(__name__)

RUN_ID_DIGITS = 64


class JoinedRuns:
    """The offers in <data-dir>/runs/joined, one file per run. Every read verifies the file."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "runs" / "joined"
        self._data_dir = data_dir

    def load(self, run_id: RunId) -> RunOffer | None:
        """Read a run's offer; None if it is missing or damaged, because peers can send it again."""
        if not is_run_id(run_id):  # it comes from peers and becomes a file name
            return None
        file = self._file(run_id)
        try:
            form = file.read()
            return None if form is None else offer_of(run_id, form)
        except (StorageError, DataError) as error:
            _LOG.warning("The stored run %s cannot be used: %s", file.path, error)
            return None

    def keep(self, offer: RunOffer) -> OfferChoice:
        """Merge a checked offer into the stored one and return the result. Raises StorageError."""
        held = self.load(offer.run_id)
        choice = OfferChoice(offer, is_new=True) if held is None else better_of(held, offer)
        if choice.is_new:
            self._file(offer.run_id).write(choice.offer.form)
        return choice

    def _file(self, run_id: RunId) -> StateFile[OfferForm]:
        return StateFile(
            self._folder / f"{run_id}.json",
            OfferForm,
            on_damage="ignore",
            if_damaged="peers can send it again",
            max_bytes=MAX_OFFER_BYTES,
            data_dir=self._data_dir,
        )


def is_run_id(text: str) -> bool:
    """Return whether a text is 64 lower-case hex digits."""
    return len(text) == RUN_ID_DIGITS and not set(text) - set("0123456789abcdef")


def read_offer_file(file: Path) -> RunOffer:
    """Read and verify an offer. Raises StorageError if the file cannot be read, DataError if it is not an offer."""
    data = read_bounded(file, MAX_OFFER_BYTES)
    if data is None:
        raise StorageError(
            f"{file} does not exist.", "Name a run by the path of its file or by its id (64 hex digits)."
        )
    try:
        return read_offer(data)
    except DataError as error:
        raise RunOfferError(
            f"{file} does not contain a run that its owner signed. {error.message}", error.action
        ) from error


MAX_POINTER_BYTES = 4096
MAX_RUN_BYTES = 64 * 1024
_START_ANEW = "Move it away to start a new run."


@dataclass(frozen=True)
class LocalRun:
    """A stored run that this node trains and offers to nodes that want to join."""

    run_id: RunId
    parameters: RunParameters  # the newest; `offer` has those of every outer step
    offer: RunOffer
    is_joined: bool = False  # named or found, and so shared by several nodes

    @classmethod
    def of(cls, offer: RunOffer, *, is_joined: bool = False) -> LocalRun:
        """Wrap a checked offer with its newest parameters."""
        return cls(offer.run_id, offer.parameters, offer, is_joined)


class SourceMemory(Struct, frozen=True):
    """Record of a data source from earlier starts: the key that signed it and the file of the run that it fed."""

    signing_key: str | None  # hex; once a source was signed, an unsigned manifest is refused
    run_file: str
    source: str = ""  # for people

    def __post_init__(self) -> None:
        """Raise ValueError for a file outside the folder of the record."""
        if Path(self.run_file).name != self.run_file:
            raise ValueError("it names a file outside its folder")


class LocalRuns:
    """The runs that one wallet created in one data folder, and the sources that feed them."""

    def __init__(self, data_dir: Path, wallet: Wallet) -> None:
        self._folder = data_dir / "runs" / wallet.wallet_id
        self._data_dir = data_dir
        self._wallet = wallet
        self._known = JoinedRuns(data_dir)  # later versions that the owner signed are stored there

    def of_data(self, pins: GenesisPins) -> LocalRun | None:
        """The run on this data, if any. Signing key and tokenizer identify the data, because more shards may follow."""
        return self._load(_data_file(pins))

    def of_source(self, source: str) -> tuple[SourceMemory, LocalRun | None] | None:
        """A source's record and the run that it feeds; None if the source is new. Raises StorageError for damage."""
        memory = self._source_file(source).read()
        return None if memory is None else (memory, self._load(memory.run_file))

    def create(self, parameters: RunParameters) -> LocalRun:
        """Sign and store a new run. Raises StorageError if it cannot be written."""
        signed = SignedRunParameters.sign(self._wallet, parameters)
        _own_file(self._folder / _data_file(parameters.genesis)).write(signed.form)
        return LocalRun.of(RunOffer.of_new_run(signed))

    def remember_source(self, source: str, run: LocalRun) -> None:
        """Record that a source feeds a run. Raises StorageError if it cannot be written."""
        pins = run.parameters.genesis
        self._source_file(source).write(SourceMemory(pins.signing_key, _data_file(pins), source))

    def _source_file(self, source: str) -> StateFile[SourceMemory]:
        """Record of a source. Damage stops the start, because the record protects against unsigned data."""
        name = f"source-{hash_parts('neuroshard/source', source).hex()[:16]}.json"
        advice = "Delete it to treat this source as a new one."
        return StateFile(
            self._folder / name, SourceMemory, "fail", advice, max_bytes=MAX_POINTER_BYTES, data_dir=self._data_dir
        )

    def _load(self, name: str) -> LocalRun | None:
        file = _own_file(self._folder / name)
        form = file.read()
        if form is None:
            return None
        try:
            signed = SignedRunParameters.from_form(form)
        except DataError as error:
            raise StorageError(f"The run in {file.path} cannot be used: {error}", _START_ANEW) from error
        if signed.owner_public_key != self._wallet.public_key:
            raise StorageError(f"{file.path} belongs to another wallet.", _START_ANEW)
        offer = RunOffer.of_new_run(signed)
        later = self._known.load(offer.run_id)
        newest = offer if later is None else better_of(offer, later).offer
        return LocalRun.of(last_successor(newest, self._known.load))


def find_run(data_dir: Path, run_id: RunId) -> RunOffer | None:
    """Find a stored run of any owner, joined or created here; None if it is not stored in this data folder."""
    offer = JoinedRuns(data_dir).load(run_id)
    if offer is not None:
        return offer
    for file in (data_dir / "runs").glob("*/own-*.json"):
        try:
            form = _own_file(file).read()
            own = None if form is None else RunOffer.of_new_run(SignedRunParameters.from_form(form))
        except (StorageError, DataError) as error:
            _LOG.warning("The stored run %s cannot be used: %s", file, error)
            continue
        if own is not None and own.run_id == run_id:
            return own
    return None


def named_offer(named: str, data_dir: Path) -> RunOffer:
    """Read and verify a run from a file, or find it by its id in the data folder. Raises UsageError if not found."""
    text = named.strip().lower()
    if is_run_id(text):
        offer = find_run(data_dir, RunId(text))
        if offer is None:
            raise UsageError(f"The run {text} is not known in {data_dir}.", "Give its signed file instead.")
        return offer
    looks_like_an_id = len(text) >= 8 and not set(text) - set("0123456789abcdef")
    if looks_like_an_id and not Path(named).exists():
        raise UsageError(f"A run id has {RUN_ID_DIGITS} hex digits, {named} has {len(text)}.", "Give the whole id.")
    return read_offer_file(Path(named))


def _data_file(pins: GenesisPins) -> str:
    key = hash_parts("neuroshard/own-run", pins.signing_key or "", pins.tokenizer_sha256)
    return f"own-{key.hex()[:16]}.json"


def _own_file(path: Path) -> StateFile[SignedForm]:
    """A run that a wallet created. Damage stops the start, because a new run would begin from random weights."""
    return StateFile(path, SignedForm, on_damage="fail", if_damaged=_START_ANEW, max_bytes=MAX_RUN_BYTES)
