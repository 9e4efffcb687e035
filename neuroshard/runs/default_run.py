"""The default run of a data set: `run.json` next to its manifest, signed by the key that signed the manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import anyio
import msgspec
from msgspec import Meta, Struct

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.config.run_parameters import MAX_SEEDS
from neuroshard.config.state_file import read_bounded, write_atomically
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, parse_manifest
from neuroshard.data.transfer import FileRequest
from neuroshard.decoders import read_json
from neuroshard.errors import DataError, StorageError, UsageError
from neuroshard.identity import SignatureError, Signer, Wallet, canonical_json, sign_json, verify_json
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.model.memory_limit import available_mb, probe_memory, tier_mb
from neuroshard.runs.creation import OPENING_SECONDS
from neuroshard.runs.data_opening import largest_tokenizer_bytes, pins_of_source
from neuroshard.runs.offer import RunOffer
from neuroshard.types import HexKey, HexSignature, NamedRun

_LOG = logging.getLogger(__name__)

RUN_FILE = "run.json"
MAX_RUN_FILE_BYTES = 16 * 1024
LOOK_SECONDS = 5.0  # an unresponsive data server must not keep a node from training


class DefaultRun(Struct, frozen=True, forbid_unknown_fields=True):
    """The run that a node joins if its owner did not name one."""

    run_id: NamedRun
    owner_public_key: HexKey
    seeds: Annotated[tuple[str, ...], Meta(max_length=MAX_SEEDS)]  # multiaddrs of nodes that know the run

    def __post_init__(self) -> None:
        """Raise ValueError for a seed that is not a complete address."""
        for seed in self.seeds:
            checked_multiaddr(seed)


class SignedDefaultRun(DefaultRun, frozen=True):
    """The content of run.json. The signature covers the canonical JSON of the other fields."""

    signature: HexSignature


def write_default_run(run: DefaultRun, signer: Signer) -> bytes:
    """Return the signed bytes of run.json. Readers require the key that signed the manifest."""
    value = msgspec.to_builtins(run)
    return canonical_json({**value, "signature": sign_json(signer, value)})


def read_default_run(data: bytes, manifest_key: str) -> DefaultRun:
    """Parse a default run. Raises DataError if it is malformed or not signed by the manifest's key (hex)."""
    try:
        signed = read_json(data, SignedDefaultRun, MAX_RUN_FILE_BYTES)
        run = DefaultRun(signed.run_id, signed.owner_public_key, signed.seeds)
        verify_json(bytes.fromhex(manifest_key), msgspec.to_builtins(run), signed.signature)
    except (ValueError, SignatureError) as error:
        raise DataError(f"{RUN_FILE} of the data set cannot be used: {error}") from None
    return run


async def default_run_of(fetcher: Fetcher, manifest_key: str | None) -> DefaultRun | None:
    """Fetch a source's default run; None if it has none, does not answer in time, or its run.json is not valid."""
    if manifest_key is None:
        return None  # anyone who can change an unsigned data set could redirect its readers to any run
    request = FileRequest(RUN_FILE, 2, MAX_RUN_FILE_BYTES, give_up_after=1)
    with anyio.move_on_after(LOOK_SECONDS):
        try:
            data = await fetcher.fetch_bytes(request, bytes)
        except DataError:
            return None  # most data sets have none
        try:
            return read_default_run(data, manifest_key)
        except DataError as error:
            _LOG.warning("%s", error)
    return None


_FILE_MODE = 0o644  # it is served with the manifest


@dataclass(frozen=True)
class Published:
    """The default run that was written, and the different run that it replaced, if any."""

    run: DefaultRun
    file: Path
    replaced: DefaultRun | None


def publish_run(wallet: Wallet, offer: RunOffer, folder: Path, seeds: Sequence[str]) -> Published:
    """Make a run the default one of the Genesis folder it trains on. Without `seeds` (multiaddrs), the run's are used.

    Raises UsageError if another wallet signed the manifest or a seed is malformed, DataError if the folder does not
    contain the run's data or they are not signed, and StorageError.
    """
    chosen = _checked_seeds(seeds or offer.parameters.seeds)
    key = _manifest_key(folder)
    if wallet.public_key.hex() != key:
        raise UsageError(
            f"The data in {folder} are signed by wallet {wallet_id_of(bytes.fromhex(key))}, not by {wallet.wallet_id}.",
            "Nodes believe only a default run that the same wallet signed: use the token the data were built with.",
        )
    before = _present(folder / RUN_FILE, key)
    _check_data(offer, folder)
    run = DefaultRun(offer.run_id, offer.initial.owner_public_key.hex(), chosen)
    file = folder / RUN_FILE
    try:
        write_atomically(file, write_default_run(run, wallet), _FILE_MODE)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror}.", "Make the folder writable.") from error
    return Published(run, file, before if before is not None and before.run_id != run.run_id else None)


def _checked_seeds(seeds: Sequence[str]) -> tuple[str, ...]:
    if len(seeds) > MAX_SEEDS:
        raise UsageError(f"{len(seeds)} seeds are too many.", f"Name at most {MAX_SEEDS}.")
    try:
        return tuple(dict.fromkeys(map(checked_multiaddr, seeds)))
    except ValueError as error:
        raise UsageError(f"--seed cannot be used: {error}.") from None


def _manifest_key(folder: Path) -> str:
    """Hex key that signed the folder's manifest. Raises DataError if there is no manifest or no signature."""
    data = read_bounded(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES)
    if data is None:
        raise DataError(f"{folder} is not a Genesis folder: it has no {MANIFEST_NAME}.", "Check --genesis.")
    key = parse_manifest(data).signing_key
    if key is None:
        raise DataError(f"The data in {folder} are not signed, so they cannot name a run.", "Build them with a token.")
    return key


def _present(file: Path, key: str) -> DefaultRun | None:
    """Read the default run that the file names now. Raises UsageError if the file is not a valid run.json."""
    data = read_bounded(file, MAX_RUN_FILE_BYTES)
    if data is None:
        return None
    try:
        return read_default_run(data, key)
    except DataError as error:
        raise UsageError(f"{file} is not overwritten. {error.message}", "Move it away first.") from None


def _check_data(offer: RunOffer, folder: Path) -> None:
    """Raises DataError if the folder itself does not contain the run's data. The node's own copies do not count."""
    with TemporaryDirectory(prefix="neuroshard-") as copies:
        opened = partial(
            pins_of_source,
            str(folder),
            Path(copies),
            wanted=offer.parameters.genesis,
            max_tokenizer_bytes=largest_tokenizer_bytes(tier_mb(available_mb(probe_memory(), None))),
            seconds=OPENING_SECONDS,
        )
        anyio.run(opened, backend="trio")
