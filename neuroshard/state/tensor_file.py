"""Tensors in files: the safetensors file of a checkpoint, and the residual file next to it.

A safetensors file (https://huggingface.co/docs/safetensors) has 8 bytes of header length (little endian), a JSON
header, and the raw little-endian tensors without gaps. It is hashed while it is written, and read only after its
header was checked. We have our own writer because the library builds whole files in memory or from tensors a second
time, and neither can hash while writing. Each of the two reads the files of the other.

The residual file holds the SHA-256 of the tensor file and of the numbers, then the numbers: a residual belongs to one
generation and is never sent to other nodes. A damaged or lost residual costs the rounding of one contribution, so the
generation stays valid."""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import file_digest, sha256
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from neuroshard.config.state_file import TEMPORARY_PREFIX
from neuroshard.errors import CheckpointError
from neuroshard.state.checkpoint_manifest import IncompatibleCheckpointError, unreadable

MAX_HEADER_BYTES = 10_000_000
CHUNK_BYTES = 4 << 20
_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}

if sys.byteorder != "little":
    raise ImportError("checkpoints are little endian; this computer is not")


@dataclass(frozen=True)
class StoredTensor:
    """Shape and type of one stored tensor, and its position after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Offset of the first byte after the tensor."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorLayout:
    """All tensors of one file in the order of their bytes, without gaps."""

    specs: Mapping[str, StoredTensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> TensorLayout:
        """Return the layout in which these tensors are stored: widest type first for alignment, otherwise as given."""
        specs: dict[str, StoredTensor] = {}
        position = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            if tensor.dtype not in _CODES or name == "__metadata__":
                raise ValueError(f"tensor {name} of type {tensor.dtype} cannot be stored")
            specs[name] = StoredTensor(tensor.dtype, tuple(tensor.shape), position)
            position = specs[name].stop
        return cls(specs)

    @property
    def data_bytes(self) -> int:
        return max((spec.stop for spec in self.specs.values()), default=0)

    @property
    def file_bytes(self) -> int:
        return len(self.header()) + self.data_bytes

    def chunks_of(self, names: Iterable[str], chunk_bytes: int) -> set[int]:
        """Return the numbers of the chunks of the file that contain bytes of these tensors."""
        start = len(self.header())
        places = [(start + self.specs[name].start, start + self.specs[name].stop) for name in names]
        return {index for first, stop in places for index in range(first // chunk_bytes, -(-stop // chunk_bytes))}

    def header(self) -> bytes:
        """Return the length and the JSON header, padded with spaces so that the data is aligned to 8 bytes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, spec in self.specs.items():
            entries[name] = {
                "dtype": _CODES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [spec.start, spec.stop],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy."""
    return memoryview(cast("Any", tensor.detach().view(-1).view(torch.uint8).numpy()))


def write_tensor_file(
    file: IO[bytes],
    layout: TensorLayout,
    chunks: Iterable[memoryview],
    cancelled: Callable[[], bool] | None = None,
) -> str:
    """Write header and chunks (tensor bytes in layout order); return the hex SHA-256 of all bytes written.

    Raises OSError from the file, InterruptedError when `cancelled` returns True.
    """
    header = layout.header()
    digest = sha256(header)
    file.write(header)
    for chunk in chunks:
        for start in range(0, len(chunk), CHUNK_BYTES):
            if cancelled is not None and cancelled():
                raise InterruptedError("the write was cancelled")
            piece = chunk[start : start + CHUNK_BYTES]
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def read_layout(file: IO[bytes], file_bytes: int) -> tuple[TensorLayout, bytes]:
    """Check the header at the start of a file of `file_bytes`; returns the layout and the header's own bytes.

    Raises CheckpointError unless every tensor has a known type and a shape that fits its byte range, and the ranges
    fill the file exactly.
    """
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
        raise CheckpointError(f"The tensor file's header length {length} is impossible.")
    raw = file.read(length)
    try:
        entries: object = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("The tensor file's header is not JSON.") from error
    if len(raw) < length or not isinstance(entries, dict):
        raise CheckpointError("The tensor file's header is cut off or not an object.")
    named = cast("dict[str, object]", entries)
    specs = {name: _spec(name, entry) for name, entry in named.items() if name != "__metadata__"}
    ordered = dict(sorted(specs.items(), key=lambda item: (item[1].start, item[1].stop)))
    places = list(ordered.values())
    gaps = any(first.stop != second.start for first, second in pairwise(places))
    end = places[-1].stop if places else 0
    if gaps or (places and places[0].start != 0) or 8 + length + end != file_bytes:
        raise CheckpointError("The tensor file's contents have gaps, overlap or do not end with the file.")
    return TensorLayout(ordered), prefix + raw


def read_tensor_file(path: Path, expected: TensorLayout, digest: str, into: Callable[[str], Tensor]) -> None:
    """Read every tensor of `expected` into the contiguous CPU tensor that `into(name)` gives for it.

    The header is compared before anything is read. The digest is checked at the end, so on an error the contents of the
    destinations are undefined. Raises IncompatibleCheckpointError when the header differs, CheckpointError.
    """
    try:
        with path.open("rb") as file:
            layout, header = read_layout(file, path.stat().st_size)
            if difference := layout_difference(layout, expected):
                raise IncompatibleCheckpointError(f"{path.name} has other tensors: {difference}.", "set-aside-tensors")
            computed = sha256(header)
            for name in layout.specs:
                for piece in _pieces(bytes_of(into(name))):
                    if file.readinto(piece) != len(piece):
                        raise CheckpointError(f"{path.name} ends too early.")
                    computed.update(piece)
    except OSError as error:
        raise unreadable(path, error) from error
    if computed.hexdigest() != digest:
        raise CheckpointError(f"{path.name} is damaged: its SHA-256 is not the one it was written with.")


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a whole file. Raises OSError."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def map_tensor_file(path: Path, digest: str) -> dict[str, Tensor]:
    """Map the tensors of a file after checking its digest; memory is used only for pages that are read.

    Writing to them changes nothing on disk. Raises CheckpointError.
    """
    try:
        with path.open("rb") as file:
            layout, header = read_layout(file, path.stat().st_size)
            if sha256_of(path) != digest:
                raise CheckpointError(f"{path.name} is damaged: its SHA-256 is not the one it was written with.")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise unreadable(path, error) from error
    return {name: _mapped(mapped, len(header) + spec.start, spec) for name, spec in layout.specs.items()}


def layout_difference(found: TensorLayout, expected: TensorLayout) -> str | None:
    """Describe the first difference between two layouts, or return None when they are equal."""
    for name, spec in expected.specs.items():
        other = found.specs.get(name)
        if other is None:
            return f"tensor {name} is missing"
        if (other.dtype, other.shape) != (spec.dtype, spec.shape):
            return f"tensor {name} is {other.dtype} {list(other.shape)}, not {spec.dtype} {list(spec.shape)}"
    extra = [name for name in found.specs if name not in expected.specs]
    return f"tensor {extra[0]} is not known" if extra else None


def _mapped(memory: mmap.mmap, offset: int, spec: StoredTensor) -> Tensor:
    count = math.prod(spec.shape)
    if count == 0:
        return torch.zeros(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=offset).view(spec.shape)


def _pieces(memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(memory), CHUNK_BYTES):
        yield memory[start : start + CHUNK_BYTES]


def _spec(name: str, entry: object) -> StoredTensor:
    fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    if fields.keys() != {"dtype", "shape", "data_offsets"} or not isinstance(fields["dtype"], str):
        raise CheckpointError(f"The tensor file describes {name!r} in an unknown way.")
    code, sizes, place = fields["dtype"], fields["shape"], fields["data_offsets"]
    if code not in _DTYPES or not _whole_numbers(sizes, 8) or not _whole_numbers(place, 2) or len(place) != 2:
        raise CheckpointError(f"The tensor file gives {name!r} an unknown type, shape or place.")
    if math.prod(max(size, 1) for size in sizes) >= 1 << 48:  # an empty tensor may have a size that cannot be indexed
        raise CheckpointError(f"The tensor file gives {name!r} an unknown type, shape or place.")
    spec = StoredTensor(_DTYPES[code], tuple(sizes), place[0])
    if spec.stop != place[1]:
        raise CheckpointError(f"The tensor file's place for {name!r} does not fit its shape.")
    return spec


def _whole_numbers(value: Any, most: int) -> bool:
    if not isinstance(value, list):
        return False
    numbers = cast("list[object]", value)
    return len(numbers) <= most and all(type(number) is int and 0 <= number < 1 << 48 for number in numbers)


SUFFIX = ".residual"
_LABEL = b"neuroshard/residual"
_DIGEST_BYTES = 32
_LOG = logging.getLogger(__name__)


def residual_path(tensors: Path) -> Path:
    """Return the path of the residual of the generation with this tensor file."""
    return tensors.with_suffix(SUFFIX)


def write_residual(residual: Tensor, tensors: Path, tensors_sha256: str) -> None:
    """Write a residual (d,), whole or not at all, next to its generation's tensors. Raises OSError."""
    temporary = tensors.with_name(f"{TEMPORARY_PREFIX}{tensors.stem}{SUFFIX}-{secrets.token_hex(4)}")
    with temporary.open("xb") as file:
        file.write(_digest(residual, tensors_sha256))
        file.write(bytes_of(residual))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(residual_path(tensors))


def read_residual(tensors: Path, tensors_sha256: str) -> Tensor | None:
    """Read the residual (d,) of a generation; None, with a warning, if it is damaged or belongs to another one."""
    path = residual_path(tensors)
    try:
        if not path.exists():
            return None
        length, rest = divmod(path.stat().st_size - _DIGEST_BYTES, 4)
        if rest == 0 and 0 < 4 * length < tensors.stat().st_size:
            residual = torch.empty(length)
            with path.open("rb") as file:
                digest, read = file.read(_DIGEST_BYTES), file.readinto(bytes_of(residual))
            if read == residual.nbytes and digest == _digest(residual, tensors_sha256):
                return residual
        trouble = "it is not the one that was written with the checkpoint"
    except OSError as error:
        trouble = error.strerror or str(error)
    _LOG.warning("%s is not used: %s. The next round begins without it.", path, trouble)
    return None


def _digest(residual: Tensor, tensors_sha256: str) -> bytes:
    digest = sha256(_LABEL + bytes.fromhex(tensors_sha256))
    digest.update(bytes_of(residual))
    return digest.digest()
