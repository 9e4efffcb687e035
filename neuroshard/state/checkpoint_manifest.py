"""The JSON half of a checkpoint: everything except the tensors. It is written last, which commits the generation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from neuroshard.errors import CheckpointError, StorageError
from neuroshard.identity import architecture_to_json
from neuroshard.status.snapshot import HeldOutPoint, LossPoint
from neuroshard.types import Architecture, DataPosition, LayerRange, NodeId, RunId, WalletId

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel


FORMAT_VERSION = 1
MAX_META_BYTES = 4_000_000


class IncompatibleCheckpointError(CheckpointError):
    """A complete checkpoint that belongs to another model, run or version of the format."""

    def __init__(self, message: str, folder_name: str = "set-aside") -> None:
        super().__init__(message)
        self.folder_name = folder_name  # folder to which the checkpoint is moved and kept


@dataclass(frozen=True)
class CheckpointMeta:
    """State of one stage at one step, except tensors. Losses that are not finite are None."""

    wallet_id: WalletId
    node_id: NodeId
    run_id: RunId
    architecture: Architecture
    layers: LayerRange
    step: int
    time: float  # seconds since the epoch
    tokens: int = 0
    sequences: int = 0
    loss: float | None = None
    loss_ema: float | None = None
    outer_step: int = 0
    inner_step: int = 0  # since the last outer step
    data_position: DataPosition | None = None
    rng: Mapping[str, str] = field(default_factory=dict[str, str])  # generator name -> state as hex
    threads: int = 1  # results are bit-identical only with the same number
    precision: str = "fp32"  # "": the state came from another computer and was not trained on here yet
    held_out: tuple[HeldOutPoint, ...] = ()
    history: tuple[LossPoint, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])  # JSON values the trainer adds (read as lists)
    subspace_seed: int | None = None  # from which the basis and the frozen rows follow; None without a subspace


@dataclass(frozen=True)
class TensorFile:
    """The tensor half of a checkpoint: its file name, length and digest."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """The whole content of a generation's JSON file."""

    meta: CheckpointMeta
    tensors: TensorFile


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Encode as JSON with its own digest: equal manifests give equal bytes. Raises ValueError beyond MAX_META_BYTES."""
    # Without the options and the seed that a plain model does not use, so that its checkpoints keep their bytes.
    meta = asdict(_finite(manifest.meta)) | {"architecture": architecture_to_json(manifest.meta.architecture)}
    if manifest.meta.subspace_seed is None:
        del meta["subspace_seed"]
    content = {"meta": meta, "tensors": asdict(manifest.tensors)}
    document = {"format_version": FORMAT_VERSION, "content": content, "sha256": _digest(content)}
    encoded = json.dumps(document, indent=1, sort_keys=True, allow_nan=False, default=structs.asdict).encode()
    if len(encoded) > MAX_META_BYTES:
        raise ValueError(f"checkpoint metadata of {len(encoded)} bytes exceeds {MAX_META_BYTES}")
    return encoded


def decode_manifest(raw: bytes) -> CheckpointManifest:
    """Parse strictly. Raises CheckpointError when damaged, IncompatibleCheckpointError for an unknown version."""
    from pydantic import ValidationError

    if len(raw) > MAX_META_BYTES:
        raise CheckpointError(f"The checkpoint's JSON is larger than {MAX_META_BYTES} bytes.")
    try:
        document: Any = json.loads(raw)
        version, content, digest = document["format_version"], document["content"], document["sha256"]
        computed = _digest(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError("The checkpoint's JSON is damaged.") from error
    if type(version) is int and version > FORMAT_VERSION:
        raise IncompatibleCheckpointError(
            f"The checkpoint has format version {version}; this program reads version {FORMAT_VERSION}.",
            f"set-aside-format{version}",
        )
    if version != FORMAT_VERSION or computed != digest:
        raise CheckpointError("The checkpoint's JSON is damaged: its SHA-256 is not the one it was written with.")
    try:
        checked = _reader().model_validate_json(json.dumps(content))
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise CheckpointError(f"The checkpoint's JSON has a wrong or unknown field: {place}.") from None
    return CheckpointManifest(cast("Any", checked).meta, cast("Any", checked).tensors)


@cache
def _reader() -> type[BaseModel]:
    """Build the model on first use: training does not need pydantic. Nested dataclasses inherit its strictness."""
    from pydantic import ConfigDict, create_model

    return create_model(
        "StrictManifest",
        __config__=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False),
        meta=(CheckpointMeta, ...),
        tensors=(TensorFile, ...),
    )


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=structs.asdict)
    return sha256(text.encode()).hexdigest()


def _finite(meta: CheckpointMeta) -> CheckpointMeta:
    """Replace losses that are not finite by None and drop such points of curves, because JSON cannot represent them."""
    return replace(
        meta,
        loss=meta.loss if meta.loss is not None and math.isfinite(meta.loss) else None,
        loss_ema=meta.loss_ema if meta.loss_ema is not None and math.isfinite(meta.loss_ema) else None,
        extra={name: _without_nan(value) for name, value in meta.extra.items()},
        history=tuple(point for point in meta.history if math.isfinite(point.loss)),
        held_out=tuple(
            point
            for point in meta.held_out
            if math.isfinite(point.loss) and math.isfinite(point.improvement) and math.isfinite(point.standard_error)
        ),
    )


def _without_nan(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _without_nan(item) for name, item in cast("dict[str, Any]", value).items()}
        case list() | tuple():
            return [_without_nan(item) for item in cast("list[Any]", value)]
        case _:
            return value


def unreadable(path: Path, error: OSError) -> StorageError:
    """Return the error: a missing or failing file is damage, one that this user may not read is not."""
    message = f"{path} cannot be read: {error.strerror or error}."
    if isinstance(error, PermissionError):
        return StorageError(message, "Make its files readable for this user.")
    return CheckpointError(message)
