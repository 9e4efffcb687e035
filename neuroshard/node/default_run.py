"""The default run of a data set: `run.json` beside its manifest, signed by the key that signed the manifest."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import anyio

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.transfer import FileRequest
from neuroshard.errors import DataError
from neuroshard.identity import SignatureError, Signer, canonical_json, parse_json, sign_json, verify_json
from neuroshard.identity.strict_json import exact_object, hex_field, text_field
from neuroshard.types import JsonValue, RunId

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
MAX_RUN_FILE_BYTES = 16 * 1024
MAX_SEEDS = 16
LOOK_SECONDS = 5.0  # a data server that answers nothing must not keep a node from training
_FIELDS = {"run_id", "owner_public_key", "seeds"}


@dataclass(frozen=True)
class DefaultRun:
    """The run to join when the owner of this computer named none."""

    run_id: RunId
    owner_public_key: bytes
    seeds: tuple[str, ...]  # multiaddrs of nodes that know the run


def write_default_run(run: DefaultRun, signer: Signer) -> bytes:
    """The bytes of run.json, signed; the signer must be the one of the manifest."""
    value = _value(run)
    return canonical_json({**value, "signature": sign_json(signer, value)})


def read_default_run(data: bytes, manifest_key: str) -> DefaultRun:
    """The default run in `data`. Raises DataError when it is malformed or not signed by the manifest's key (hex)."""
    try:
        fields = exact_object(parse_json(data, MAX_RUN_FILE_BYTES), _FIELDS | {"signature"}, RUN_FILE)
        run = DefaultRun(
            run_id=RunId(hex_field(fields["run_id"], 32, "run_id").hex()),
            owner_public_key=hex_field(fields["owner_public_key"], 32, "owner_public_key"),
            seeds=_seeds(fields["seeds"]),
        )
        verify_json(bytes.fromhex(manifest_key), _value(run), text_field(fields["signature"], 128, "signature"))
    except (ValueError, SignatureError) as error:
        raise DataError(f"{RUN_FILE} of the data set cannot be used: {error}") from None
    return run


async def default_run_of(fetcher: Fetcher, manifest_key: str | None) -> DefaultRun | None:
    """The default run that a source names; None when it names none, does not answer soon, or cannot be believed."""
    if manifest_key is None:
        return None  # whoever can change an unsigned data set could send its readers anywhere
    request = FileRequest(RUN_FILE, 2, MAX_RUN_FILE_BYTES, give_up_after=1)
    with anyio.move_on_after(LOOK_SECONDS):
        try:
            data = await fetcher.fetch_bytes(request, bytes)
        except DataError:
            return None  # most data sets have none
        try:
            return read_default_run(data, manifest_key)
        except DataError as error:
            log.warning("%s", error)
    return None


def _seeds(value: JsonValue) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_SEEDS:
        raise ValueError(f"seeds must be a list of at most {MAX_SEEDS} addresses")
    return tuple(checked_multiaddr(text_field(seed, 256, "seeds")) for seed in value)


def _value(run: DefaultRun) -> dict[str, JsonValue]:
    return {"run_id": run.run_id, "owner_public_key": run.owner_public_key.hex(), "seeds": list(run.seeds)}
