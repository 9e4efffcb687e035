"""Shard files: token ids and nothing else (`.bin`), or a tensor in the format of torch.save (`.pt`).

A `.bin` file has little-endian uint16 ids, or uint32 ids if one of them does not fit in 16 bits. Its size shows which:
the number of tokens is known from the manifest. A `.pt` file has one contiguous one-dimensional int64 tensor. Both are
memory-mapped as they were downloaded. The caller compares the digest first."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from neuroshard.errors import DataError

ShardFormat = Literal["bin", "pt"]
TokenArray: TypeAlias = "NDArray[np.integer[Any]]"  # (n,) uint16 or uint32, int64 from a `.pt` file; read-only

MAX_CONTAINER_BYTES = 64 * 1024  # everything in a `.pt` file except the tokens
_RECORDS = {"data.pkl", "data/0", "byteorder", "version", ".format_version", ".storage_alignment",
            ".data/serialization_id"}  # fmt: skip
_MAX_DESCRIPTION_BYTES = 4096
_TENSOR_ITEM_BYTES = 8

_PUT = rb"(?:q.|r.{4})"  # the pickler's memo marks carry no value
_INT = rb"(?:K(.)|M(..)|J(.{4}))"
_TENSOR_PICKLE = re.compile(
    rb"\x80\x02ctorch\._utils\n_rebuild_tensor_v2\n" + _PUT + rb"\(\("
    rb"X\x07\x00\x00\x00storage" + _PUT + rb"ctorch\nLongStorage\n" + _PUT + rb"X\x01\x00\x00\x000" + _PUT
    + rb"X\x03\x00\x00\x00cpu" + _PUT + _INT + rb"t" + _PUT + rb"Q"
    rb"K\x00" + _INT + rb"\x85" + _PUT + rb"K\x01\x85" + _PUT
    + rb"\x89ccollections\nOrderedDict\n" + _PUT + rb"\)R" + _PUT + rb"t" + _PUT + rb"R" + _PUT + rb"\.",
    re.DOTALL,
)  # fmt: skip


@dataclass(frozen=True)
class ShardForm:
    """Expected properties of a shard file before it arrives."""

    name: str
    shard_format: ShardFormat
    max_tokens: int
    id_count: int  # the ids are below this
    exact_tokens: int | None = None  # a `.bin` file always has it
    has_digest: bool = False  # the key of the shard is the SHA-256 of the file

    @property
    def size_limits(self) -> tuple[int, int]:
        """Smallest and largest possible size of the file, in bytes."""
        least = self.exact_tokens or 1
        if self.shard_format == "bin":
            return 2 * least, item_bytes(self.id_count) * self.max_tokens
        return _TENSOR_ITEM_BYTES * least, _TENSOR_ITEM_BYTES * self.max_tokens + MAX_CONTAINER_BYTES

    def largest_id(self, tokens: TokenArray) -> int:
        """Return the largest id of a shard. Raises DataError when it is outside the vocabulary."""
        largest = int(tokens.max())
        if largest >= self.id_count:
            raise DataError(f"{self.name} has the token id {largest}, outside its vocabulary of {self.id_count}.")
        return largest


def item_bytes(id_count: int) -> int:
    """Return the bytes per token in a `.bin` file with ids below `id_count`: 2 when every id fits, otherwise 4."""
    return 2 if id_count <= 1 << 16 else 4


def shard_bytes(tokens: NDArray[np.integer[Any]], shard_format: ShardFormat) -> bytes:
    """Encode (n,) token ids as a shard file; equal tokens give equal bytes."""
    if tokens.ndim != 1 or tokens.size == 0 or int(tokens.min()) < 0:
        raise ValueError(f"a shard needs a non-empty one-dimensional array of ids >= 0, got shape {tokens.shape}")
    if shard_format == "bin":
        return tokens.astype(f"<u{item_bytes(int(tokens.max()) + 1)}").tobytes()
    import torch  # takes seconds to import, and a data set of `.bin` files does not need it

    buffer = io.BytesIO()
    torch.save(torch.from_numpy(tokens.astype("<i8")), buffer)  # pyright: ignore[reportUnknownMemberType]
    return buffer.getvalue()


def map_shard(path: Path, form: ShardForm) -> TokenArray:
    """Map a file whose digest was checked. Raises DataError when it is not a shard, OSError when it cannot be read."""
    size = path.stat().st_size
    if form.shard_format == "bin":
        return np.memmap(path, dtype=_item_type(size, form), mode="r")
    with path.open("rb") as file:
        _check_container(file, size, form)
    return _load_tensor(form, lambda torch: torch.load(path, weights_only=True, mmap=True))


def read_shard(content: bytes, form: ShardForm) -> TokenArray:
    """Read the tokens of a file in memory. Raises DataError when it is not a shard."""
    if form.shard_format == "bin":
        return np.frombuffer(content, dtype=_item_type(len(content), form))
    _check_container(io.BytesIO(content), len(content), form)
    return _load_tensor(form, lambda torch: torch.load(io.BytesIO(content), weights_only=True))


def _item_type(size: int, form: ShardForm) -> str:
    tokens = form.exact_tokens or 0
    if not tokens or size not in (2 * tokens, 4 * tokens):
        raise DataError(f"{form.name} has {size} bytes; {tokens} tokens take {2 * tokens} or {4 * tokens}.")
    return f"<u{size // tokens}"


class _SmallReads:
    """A file that is read in small pieces, except its tokens, so a declared size never allocates memory."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._size = size
        self.tell = file.tell

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Raises BadZipFile for a place outside the file."""
        if not 0 <= offset + (self._size if whence == io.SEEK_END else 0) <= self._size:
            raise zipfile.BadZipFile("a part is outside the file")
        return self._file.seek(offset, whence)

    def seekable(self) -> bool:
        """zipfile calls this."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Raises BadZipFile for a read of a size that no shard file needs."""
        most = 2 * MAX_CONTAINER_BYTES
        data = self._file.read(min(size, most + 1) if size >= 0 else most + 1)
        if len(data) > most:
            raise zipfile.BadZipFile("a part is too large")
        return data


def _check_container(file: IO[bytes], size: int, form: ShardForm) -> None:
    """Refuse input for which torch.load could allocate memory: compressed records, and any pickle but one tensor's."""
    if size > form.size_limits[1]:
        raise DataError(f"{form.name} has {size} bytes, more than a shard of {form.max_tokens} tokens can have.")
    try:
        with zipfile.ZipFile(cast("IO[bytes]", _SmallReads(file, size))) as container:
            problem = _container_problem(container)
            if not problem and not form.has_digest:  # without a digest, the checksum is all that finds a flipped token
                _check_tokens(container)
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        problem = str(error)
    if problem:
        raise DataError(f"{form.name} is not a shard file: {problem}.")


def _container_problem(container: zipfile.ZipFile) -> str:
    records = {record.filename.partition("/")[2]: record for record in container.infolist()}
    if len(records) != len(container.infolist()) or not records.keys() <= _RECORDS:
        return "it has other records than one tensor, or two of the same name"
    if any(record.compress_type != zipfile.ZIP_STORED for record in records.values()):
        return "it has compressed records"
    if any(record.file_size > _MAX_DESCRIPTION_BYTES for name, record in records.items() if name != "data/0"):
        return "one of its descriptions is too large"
    description = _TENSOR_PICKLE.fullmatch(container.read(records["data.pkl"]))
    if "byteorder" in records and container.read(records["byteorder"]) != b"little":
        return "its numbers are not little-endian"
    if description is None:
        return "its description is not that of a one-dimensional int64 tensor"
    groups = (group for group in description.groups() if group is not None)
    counts = {int.from_bytes(group, "little", signed=len(group) == 4) for group in groups}
    stored, rest = divmod(records["data/0"].file_size, _TENSOR_ITEM_BYTES)
    return "its stored length differs from its description" if rest or counts != {stored} else ""


def _check_tokens(container: zipfile.ZipFile) -> None:
    """Compare the checksum of the tokens, in pieces. Raises BadZipFile when it differs."""
    (name,) = (name for name in container.namelist() if name.partition("/")[2] == "data/0")
    with container.open(name) as tokens:
        while tokens.read(MAX_CONTAINER_BYTES):
            pass


def _load_tensor(form: ShardForm, load: Callable[[Any], Any]) -> TokenArray:
    """Return the checked tokens of a `.pt` file. `load` is called with the torch module."""
    import torch
    from torch.serialization import pickle as restricted  # pyright: ignore[reportPrivateImportUsage]  # its own refusals

    try:
        tensor = load(torch)
    except (RuntimeError, ValueError, KeyError, EOFError, restricted.UnpicklingError) as error:
        raise DataError(f"{form.name} is not a shard file: {error}.") from error
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int64 or tensor.ndim != 1:
        raise DataError(f"{form.name} is not a shard file: it does not contain a one-dimensional int64 tensor.")
    tokens = cast("NDArray[np.int64]", tensor.numpy())
    count, exact = len(tokens), form.exact_tokens
    if not 1 <= count <= form.max_tokens or (exact is not None and count != exact):
        expected = f"exactly {exact}" if exact is not None else f"1 to {form.max_tokens}"
        raise DataError(f"{form.name} has {count} tokens, expected {expected}.")
    if int(tokens.min()) < 0:
        raise DataError(f"{form.name} has the token id {tokens.min()}, which is negative.")
    tokens.flags.writeable = False
    return tokens
