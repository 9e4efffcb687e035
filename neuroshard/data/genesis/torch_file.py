"""Shard files: a one-dimensional int64 tensor as torch.save writes it, read without an unpickler and without trust.

The zip container is checked record by record and the pickle inside it is compared with the only form that torch.save
gives to such a tensor; nothing is ever executed and nothing is allocated by a declared size.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from neuroshard.errors import DataError

MAX_CONTAINER_BYTES = 64 * 1024  # everything in a shard file but the tokens
_MAX_RECORDS = 16
_MAX_SMALL_RECORD_BYTES = 4096
_ITEM_BYTES = 8
_ALIGNMENT = 64  # where torch puts a tensor's first byte

_END = struct.Struct("<4s4H2LH")  # end of central directory
_END64_LOCATOR_BYTES, _END64_BYTES = 20, 56
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")

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
class _Record:
    """One stored entry of the container, by its central directory."""

    name: str
    start: int  # of its data in the file
    size: int
    header: int  # start of its local header
    crc: int


@dataclass(frozen=True)
class TokenRecord:
    """Where the tokens of a checked shard file lie."""

    path: Path
    offset: int
    token_count: int
    crc32: int

    def map(self) -> NDArray[np.int64]:
        """The tokens, mapped read-only: (token_count,) int64."""
        return np.memmap(self.path, dtype="<i8", mode="r", offset=self.offset, shape=(self.token_count,))

    def verify_checksum(self) -> None:
        """Read all tokens once and compare the container's CRC-32. Raises DataError when they differ."""
        if zlib.crc32(self.map().data) != self.crc32:
            raise DataError(f"{self.path.name} is damaged: its tokens do not match the checksum in the file.")


def inspect_shard(path: Path, *, max_tokens: int, exact_tokens: int | None = None) -> TokenRecord:
    """Check a shard file and say where its tokens lie; reads a few kilobytes whatever the file claims.

    Raises DataError for anything but one stored, contiguous, one-dimensional int64 tensor of 1..max_tokens ids (of
    exactly `exact_tokens` when given), and OSError when the file cannot be read.
    """
    with path.open("rb") as file:
        tokens, count = _inspect(file, path.name, max_tokens, exact_tokens)
    return TokenRecord(path, tokens.start, count, tokens.crc)


def read_shard(content: bytes, name: str, *, max_tokens: int, exact_tokens: int | None = None) -> NDArray[np.int64]:
    """The tokens of a shard file that is in memory: (n,) int64, without a copy. Raises DataError as `inspect_shard`."""
    tokens, count = _inspect(io.BytesIO(content), name, max_tokens, exact_tokens)
    return np.frombuffer(content, dtype="<i8", count=count, offset=tokens.start)


def _inspect(file: BinaryIO, name: str, max_tokens: int, exact_tokens: int | None) -> tuple[_Record, int]:
    size = file.seek(0, io.SEEK_END)
    if size > max_tokens * _ITEM_BYTES + MAX_CONTAINER_BYTES:
        raise DataError(f"{name} has {size} bytes, more than a shard of {max_tokens} tokens can have.")
    try:
        tokens, count = _check_tensor(file, _read_directory(file, size))
    except (_MalformedError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"{name} is not a shard file: {error}.") from error
    if not 1 <= count <= max_tokens or (exact_tokens is not None and count != exact_tokens):
        wanted = f"exactly {exact_tokens}" if exact_tokens is not None else f"1 to {max_tokens}"
        raise DataError(f"{name} holds {count} tokens, expected {wanted}.")
    return tokens, count


def write_shard(file: BinaryIO, tokens: NDArray[np.integer[Any]]) -> None:
    """Write (n,) token ids as a file that `torch.load(weights_only=True)` reads; equal tokens give equal bytes."""
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"a shard needs a non-empty one-dimensional array, got shape {tokens.shape}")
    payload = np.ascontiguousarray(tokens, dtype="<i8")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=False) as container:
        container.writestr(_entry("archive/data.pkl"), _tensor_pickle(payload.size))
        container.writestr(_entry("archive/byteorder"), b"little")
        entry = _entry("archive/data/0")
        start = file.tell() + _LOCAL.size + len(entry.filename) + 4
        fill = -start % _ALIGNMENT
        entry.extra = b"FB" + struct.pack("<H", fill) + b"Z" * fill  # torch's own padding field
        container.writestr(entry, payload.data.cast("B"))
        container.writestr(_entry("archive/version"), b"3\n")


class _MalformedError(Exception):
    """What is wrong with a container, in words."""


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)  # its date is a constant, 1980
    entry.create_system = 0  # else the bytes depend on the operating system
    return entry


def _tensor_pickle(count: int) -> bytes:
    """What torch.save writes for a contiguous int64 tensor of `count` elements (pickle protocol 2)."""
    number = struct.pack("<cB", b"K", count) if count < 1 << 8 else struct.pack("<ci", b"J", count)
    if 1 << 8 <= count < 1 << 16:
        number = struct.pack("<cH", b"M", count)
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\nLongStorage\nq\x02"
        b"X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04"
        + number
        + b"tq\x05QK\x00"
        + number
        + b"\x85q\x06K\x01\x85q\x07"
        b"\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
    )


def _read_exactly(file: BinaryIO, offset: int, size: int, what: str) -> bytes:
    if offset < 0:
        raise _MalformedError(f"{what} lies outside the file")
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise _MalformedError(f"{what} lies outside the file")
    return data


def _read_directory(file: BinaryIO, file_size: int) -> dict[str, _Record]:
    """Records by name without their archive prefix; their bytes must not overlap."""
    end = _read_exactly(file, file_size - _END.size, _END.size, "the end of its directory")
    magic, disk, first_disk, here, count, size, offset, comment = _END.unpack(end)
    if magic != b"PK\x05\x06" or disk or first_disk or here != count or comment:
        raise _MalformedError("it does not end with a plain zip directory")
    gap = file_size - _END.size - offset - size
    if (
        not 1 <= count <= _MAX_RECORDS
        or size > MAX_CONTAINER_BYTES
        or gap not in (0, _END64_BYTES + _END64_LOCATOR_BYTES)
    ):
        raise _MalformedError("its zip directory is not where it should be")
    if gap:
        _check_zip64(_read_exactly(file, offset + size, gap, "its directory"), count, size, offset)
    directory = _read_exactly(file, offset, size, "its directory")
    records = _parse_central(file, directory, count)
    _refuse_overlaps(records, offset)
    return _by_name(records)


def _check_zip64(data: bytes, count: int, size: int, offset: int) -> None:
    """torch always adds a zip64 end; it has to repeat what the plain one says."""
    magic, length, _, _, disk, first_disk, here, total, size64, offset64 = struct.unpack_from("<4sQ2H2L4Q", data)
    locator = struct.unpack_from("<4sLQL", data, _END64_BYTES)
    repeats = (here, total, size64, offset64) == (count, count, size, offset)
    if magic != b"PK\x06\x06" or length != _END64_BYTES - 12 or disk or first_disk or not repeats:
        raise _MalformedError("its zip64 directory contradicts the plain one")
    if locator != (b"PK\x06\x07", 0, offset + size, 1):
        raise _MalformedError("its zip64 locator points elsewhere")


def _parse_central(file: BinaryIO, directory: bytes, count: int) -> list[_Record]:
    records: list[_Record] = []
    at = 0
    for _ in range(count):
        fields = _CENTRAL.unpack_from(directory, at)
        magic, _, _, flags, method, _, _, crc, packed, size, name_size, extra_size, comment_size = fields[:13]
        header = fields[16]
        name = directory[at + _CENTRAL.size : at + _CENTRAL.size + name_size]
        if magic != b"PK\x01\x02" or method != 0 or packed != size or flags & ~0x0808 or comment_size or fields[13]:
            raise _MalformedError("it has an entry that is compressed, encrypted or malformed")
        at += _CENTRAL.size + name_size + extra_size
        records.append(_Record(name.decode("utf-8"), _data_start(file, header, name, size), size, header, crc))
    if at != len(directory):
        raise _MalformedError("its directory has bytes that belong to no entry")
    return records


def _data_start(file: BinaryIO, header: int, name: bytes, size: int) -> int:
    """Check the local header of an entry against the directory; where its data begin."""
    local = _read_exactly(file, header, _LOCAL.size + len(name), "an entry")
    magic, _, flags, method, _, _, _, packed, plain, name_size, extra_size = _LOCAL.unpack_from(local)
    deferred = bool(flags & 0x08) and packed == plain == 0  # sizes then follow the data
    if magic != b"PK\x03\x04" or method != 0 or flags & ~0x0808 or name_size != len(name):
        raise _MalformedError("an entry differs from the directory")
    if local[_LOCAL.size :] != name or not (deferred or packed == plain == size):
        raise _MalformedError("an entry differs from the directory")
    return header + _LOCAL.size + name_size + extra_size


def _refuse_overlaps(records: list[_Record], directory_start: int) -> None:
    ordered = sorted(records, key=lambda record: record.header)
    ends = [*(record.header for record in ordered[1:]), directory_start]
    for record, limit in zip(ordered, ends, strict=True):
        if record.start + record.size > limit:
            raise _MalformedError("its entries overlap or leave the file")


def _by_name(records: list[_Record]) -> dict[str, _Record]:
    prefixes = {record.name.partition("/")[0] for record in records}
    named = {record.name.partition("/")[2]: record for record in records}
    if len(prefixes) != 1 or len(named) != len(records):
        raise _MalformedError("it has entries of the same name or of several archives")
    return named


def _check_tensor(file: BinaryIO, records: dict[str, _Record]) -> tuple[_Record, int]:
    """The record with the tokens and their number, when the rest of the container agrees with it."""
    allowed = {"data.pkl", "data/0", "byteorder", "version", ".format_version", ".storage_alignment",
               ".data/serialization_id"}  # fmt: skip
    if not {"data.pkl", "data/0", "version"} <= records.keys() <= allowed:
        raise _MalformedError("it does not hold exactly one tensor")
    small = {name: record for name, record in records.items() if name != "data/0"}
    if any(record.size > _MAX_SMALL_RECORD_BYTES for record in small.values()):
        raise _MalformedError("one of its descriptions is too large")
    texts = {name: _read_exactly(file, record.start, record.size, name) for name, record in small.items()}
    if texts.get("byteorder", b"little") != b"little":
        raise _MalformedError("its numbers are not little-endian")
    match = _TENSOR_PICKLE.fullmatch(texts["data.pkl"])
    if match is None:
        raise _MalformedError("its description is not that of a one-dimensional int64 tensor")
    numbers = [int.from_bytes(group, "little", signed=len(group) == 4) for group in match.groups() if group is not None]
    if numbers[0] != numbers[1] or records["data/0"].size != numbers[0] * _ITEM_BYTES:
        raise _MalformedError("its stored length differs from its description")
    return records["data/0"], numbers[0]
