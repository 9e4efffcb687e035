"""Creates a run and its later versions: signed by the owner's wallet, stored where this wallet's nodes find it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import msgspec

from neuroshard.config.folders import NodePaths, prepare_data_dir
from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.config.state_file import write_atomically
from neuroshard.consensus.committee import change_of
from neuroshard.data.storage import METADATA_FOLDER
from neuroshard.errors import DataError, StorageError, UsageError
from neuroshard.identity import SignedRunParameters, Wallet, genesis_pins_from_json
from neuroshard.model.memory_limit import available_mb, probe_memory, tier_mb
from neuroshard.runs.authority_key import load_or_create_authority_key
from neuroshard.runs.data_opening import largest_tokenizer_bytes, pins_of_source
from neuroshard.runs.offer import (
    MAX_OFFER_BYTES,
    MAY_CHANGE,
    OfferChoice,
    RunOffer,
    better_of,
    changed_fields,
    reason_against,
)
from neuroshard.runs.run_file import NAMES, RunConfig, apply_config, new_parameters
from neuroshard.runs.stored_runs import JoinedRuns

OPENING_SECONDS = 120.0
_FILE_MODE = 0o644  # nothing in it is secret; it may be served next to a public manifest


@dataclass(frozen=True)
class Owner:
    """The wallet that signs the runs, and the data folder that stores them."""

    wallet: Wallet
    data_dir: Path


def create_run(owner: Owner, config: RunConfig, location: str, seconds: float = OPENING_SECONDS) -> OfferChoice:
    """Sign and store the first version of a run on the data at `location`.

    The same file, wallet and data always give the same run. If it is stored already, the stored offer is returned,
    with a reason if it has a later version. An organised run without `authority` gets the key of this data folder.
    Raises UsageError for a wrong entry, DataError if the source cannot be used, and StorageError.
    """
    prepare_data_dir(owner.data_dir)
    wanted = genesis_pins_from_json(config["genesis"]) if "genesis" in config else None

    async def opened() -> GenesisPins:
        return await pins_of_source(
            location,
            NodePaths.below(owner.data_dir).data_cache / METADATA_FOLDER,
            wanted=wanted,
            max_tokenizer_bytes=largest_tokenizer_bytes(tier_mb(available_mb(probe_memory(), None))),
            seconds=seconds,
        )

    if config.get("admission") == "admitted" and "authority" not in config:
        config = {**config, "authority": [load_or_create_authority_key(owner.data_dir).public_key.hex()]}
    parameters = new_parameters(config, anyio.run(opened, backend="trio"))
    signed = SignedRunParameters.sign(owner.wallet, parameters)
    return JoinedRuns(owner.data_dir).keep(RunOffer.of_new_run(signed))


def update_run(owner: Owner, offer: RunOffer, config: RunConfig) -> OfferChoice:
    """Sign and store the next version: the newest known parameters with the file's entries replacing theirs.

    Raises UsageError if the wallet does not own the run, if nothing changes, or if a fixed entry would change.
    """
    newest = newest_offer(owner, offer)
    if "holds_from_outer_step" not in config:
        raise UsageError(
            "The new version does not have holds_from_outer_step, its first outer step.",
            "Add for example: holds_from_outer_step = 40",
        )
    return sign_version(owner, newest, next_version(newest, config))


def newest_offer(owner: Owner, offer: RunOffer) -> RunOffer:
    """The owner's run with all versions that are stored here. Raises UsageError if the run has another owner."""
    if owner.wallet.public_key != offer.initial.owner_public_key:
        raise UsageError(
            f"Run {offer.run_id[:16]} belongs to wallet {offer.owner}, not to {owner.wallet.wallet_id}.",
            "Only its owner can sign a new version: use the owner's token.",
        )
    prepare_data_dir(owner.data_dir)
    held = JoinedRuns(owner.data_dir).load(offer.run_id)
    return offer if held is None else better_of(held, offer).offer


def sign_version(owner: Owner, newest: RunOffer, parameters: RunParameters) -> OfferChoice:
    """Sign and store a version after the newest one. Raises UsageError if it does not fit into offer or chain."""
    signed = SignedRunParameters.sign(owner.wallet, parameters)
    updated = newest.with_version(signed)
    if len(_for_people(updated)) > MAX_OFFER_BYTES:
        start = newest.parameters.holds_from_outer_step
        raise UsageError(
            f"Run {newest.run_id[:16]} has {len(newest.versions)} versions already; no more fit into an offer.",
            f"Let a version from outer step {start} replace the newest, or make a new run.",
        )
    try:
        change_of(signed)
    except DataError as error:
        raise UsageError(error.message, error.action) from None
    return JoinedRuns(owner.data_dir).keep(updated)


@dataclass(frozen=True)
class FieldChange:
    """A difference between two versions, by the name in the file of the run."""

    name: str
    old: object
    new: object


def differences(old: RunParameters, new: RunParameters) -> list[FieldChange]:
    """The fields that a version changes, without its number and its outer step."""

    def value(parameters: object, path: str) -> object:
        for part in path.split("."):
            parameters = getattr(parameters, part)
        return parameters

    fields = [each for each in changed_fields(old, new) if each not in {"version", "holds_from_outer_step"}]
    return [FieldChange(_name_in_file(field), value(old, field), value(new, field)) for field in fields]


def write_offer(offer: RunOffer, path: Path) -> None:
    """Write the signed offer as indented JSON. Raises StorageError."""
    try:
        write_atomically(path, _for_people(offer), _FILE_MODE)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}.", "Name another file with --out.") from error


def _for_people(offer: RunOffer) -> bytes:
    return f"{json.dumps(msgspec.to_builtins(offer.form), indent=1, sort_keys=True, ensure_ascii=False)}\n".encode()


def next_version(newest: RunOffer, config: RunConfig) -> RunParameters:
    """The parameters after the newest ones, with these entries. They apply from the same outer step unless they name a
    later one.

    Raises UsageError with the reason if an entry cannot change, or if nothing changes.
    """
    current = newest.parameters
    updated = replace(apply_config(current, config), version=current.version + 1)
    if updated.holds_from_outer_step < current.holds_from_outer_step:
        raise UsageError(
            f"holds_from_outer_step = {updated.holds_from_outer_step} is before that of version {current.version}, "
            f"{current.holds_from_outer_step}.",
            "A later version must not apply earlier.",
        )
    changed = changed_fields(current, updated)
    fixed = [_name_in_file(field) for field in changed if field not in MAY_CHANGE]
    if fixed:
        reason = reason_against(field for field in changed if field not in MAY_CHANGE)
        allowed = sorted(_name_in_file(field) for field in MAY_CHANGE - {"version", "holds_from_outer_step"})
        raise UsageError(
            f"{', '.join(dict.fromkeys(fixed))} cannot change in a run that exists{reason}.",
            f"Make a new run for that. A new version may change {', '.join(allowed)}.",
        )
    if set(changed) <= {"version", "holds_from_outer_step"}:
        raise UsageError(f"The file changes no value of version {current.version}.", "Change a value first.")
    return updated


def _name_in_file(field: str) -> str:
    return _NAMES_IN_FILE.get(field, field.split(".", maxsplit=1)[0])


_NAMES_IN_FILE: Mapping[str, str] = {field: name for name, field in NAMES.items()}
