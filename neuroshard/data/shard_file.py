"""Shard files: a one-dimensional int64 tensor in the format of torch.save, read without an unpickler.

The zip container is checked record by record and the pickle inside it is compared with the only form that torch.save
gives to such a tensor; nothing is ever executed and nothing is allocated by a declared size."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from neuroshard.errors import DataError

MAX_CONTAINER_BYTES = 64 * 1024  # everything in a shard file but the tokens
_MAX_RECORDS = 16
_MAX_SMALL_RECORD_BYTES = 4096
TOKEN_BYTES = 8
_ALIGNMENT = 64  # where torch puts a tensor's first byte

_END = struct.Struct("<4s4H2LH")  # end of central directory
_END64_LOCATOR_BYTES, _END64_BYTES = 20, 56
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_MAGIC = b"PK\x03\x04"

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
class TokenPlace:
    """Where the tokens of a checked shard file lie, and the CRC-32 that the file tells of them."""

    start: int
    count: int
    crc32: int

    @property
    def stop(self) -> int:
        """Where they end."""
        return self.start + self.count * TOKEN_BYTES


class SeekableBytes(Protocol):
    """What is read of a file."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a place; where that is."""
        ...

    def read(self, size: int, /) -> bytes:
        """The bytes that follow; fewer at the end."""
        ...


def inspect_container(
    file: SeekableBytes, name: str, *, max_tokens: int, exact_tokens: int | None = None
) -> TokenPlace:
    """Check a shard file and say where its tokens lie; reads a few kilobytes of it, and no tokens.

    Raises DataError for anything but one stored, contiguous, one-dimensional int64 tensor of 1..max_tokens ids (of
    exactly `exact_tokens` when given).
    """
    size = file.seek(0, io.SEEK_END)
    if size > max_tokens * TOKEN_BYTES + MAX_CONTAINER_BYTES:
        raise DataError(f"{name} has {size} bytes, more than a shard of {max_tokens} tokens can have.")
    try:
        tokens, count = _check_tensor(file, _read_directory(file, size))
    except (_MalformedError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"{name} is not a shard file: {error}.") from error
    check_token_count(name, count, max_tokens, exact_tokens)
    return TokenPlace(tokens.start, count, tokens.crc)


def read_shard(content: bytes, name: str, *, max_tokens: int, exact_tokens: int | None = None) -> NDArray[np.int64]:
    """The tokens of a shard file that is in memory: (n,) int64, without a copy. Raises DataError, see above."""
    place = inspect_container(io.BytesIO(content), name, max_tokens=max_tokens, exact_tokens=exact_tokens)
    return np.frombuffer(content, dtype="<i8", count=place.count, offset=place.start)


def check_token_count(name: str, count: int, max_tokens: int, exact_tokens: int | None) -> None:
    """Raises DataError when a shard may not have so many tokens."""
    if not 1 <= count <= max_tokens or (exact_tokens is not None and count != exact_tokens):
        wanted = f"exactly {exact_tokens}" if exact_tokens is not None else f"1 to {max_tokens}"
        raise DataError(f"{name} holds {count} tokens, expected {wanted}.")


def expected_place(head: bytes | bytearray) -> tuple[int, int] | None:
    """Start and number of the tokens, by what a shard file begins with; None as long as that does not tell.

    It is what the file claims: once all of it is there, `inspect_container` says whether that is true.
    """
    described = _TENSOR_PICKLE.search(head)
    if described is None:
        return None
    at = head.find(_LOCAL_MAGIC, described.end())
    while at >= 0 and len(head) >= at + _LOCAL.size:
        fields = _LOCAL.unpack_from(head, at)
        name_size, extra_size = fields[-2:]
        name = bytes(head[at + _LOCAL.size : at + _LOCAL.size + name_size])
        if len(name) == name_size and name.partition(b"/")[2] == b"data/0":
            return at + _LOCAL.size + name_size + extra_size, _numbers(described)[0]
        at = head.find(_LOCAL_MAGIC, at + 1)
    return None


def shard_bytes(tokens: NDArray[np.integer[Any]]) -> bytes:
    """The file of (n,) token ids, which `torch.load(weights_only=True)` reads; equal tokens give equal bytes.

    Put together here because a ZipFile would copy the tokens once more.
    """
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"a shard needs a non-empty one-dimensional array, got shape {tokens.shape}")
    payload = np.ascontiguousarray(tokens, dtype="<i8").data.cast("B")
    written = _Written([], [], 0)
    _add(written, b"archive/data.pkl", _tensor_pickle(tokens.size))
    _add(written, b"archive/byteorder", b"little")
    _add(written, b"archive/data/0", payload, is_aligned=True)
    _add(written, b"archive/version", b"3\n")
    directory = b"".join(written.directory)
    end = _END.pack(b"PK\x05\x06", 0, 0, 4, 4, len(directory), written.size, 0)
    return b"".join((*written.parts, directory, end))


class _MalformedError(Exception):
    """What is wrong with a container, in words."""


@dataclass
class _Written:
    """A container in the making."""

    parts: list[bytes | memoryview]
    directory: list[bytes]
    size: int  # of the parts


def _add(written: _Written, name: bytes, data: bytes | memoryview, *, is_aligned: bool = False) -> None:
    """One stored entry, dated 1980 whatever the clock says."""
    extra = b""
    if is_aligned:
        fill = -(written.size + _LOCAL.size + len(name) + 4) % _ALIGNMENT
        extra = b"FB" + struct.pack("<H", fill) + b"Z" * fill  # torch's own padding field
    version, flags, method, time, date = 20, 0, 0, 0, 1 << 5 | 1
    facts = (version, flags, method, time, date, zlib.crc32(data), len(data), len(data), len(name), len(extra))
    written.directory.append(
        _CENTRAL.pack(b"PK\x01\x02", version, *facts, 0, 0, 0, 0o600 << 16, written.size) + name + extra
    )
    written.parts += (_LOCAL.pack(_LOCAL_MAGIC, *facts) + name + extra, data)
    written.size += _LOCAL.size + len(name) + len(extra) + len(data)


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


def _read_exactly(file: SeekableBytes, offset: int, size: int, what: str) -> bytes:
    if offset < 0:
        raise _MalformedError(f"{what} lies outside the file")
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise _MalformedError(f"{what} lies outside the file")
    return data


def _read_directory(file: SeekableBytes, file_size: int) -> dict[str, _Record]:
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


def _parse_central(file: SeekableBytes, directory: bytes, count: int) -> list[_Record]:
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


def _data_start(file: SeekableBytes, header: int, name: bytes, size: int) -> int:
    """Check the local header of an entry against the directory; where its data begin."""
    local = _read_exactly(file, header, _LOCAL.size + len(name), "an entry")
    magic, _, flags, method, _, _, _, packed, plain, name_size, extra_size = _LOCAL.unpack_from(local)
    deferred = bool(flags & 0x08) and packed == plain == 0  # sizes then follow the data
    if magic != _LOCAL_MAGIC or method != 0 or flags & ~0x0808 or name_size != len(name):
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


def _check_tensor(file: SeekableBytes, records: dict[str, _Record]) -> tuple[_Record, int]:
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
    numbers = _numbers(match)
    if numbers[0] != numbers[1] or records["data/0"].size != numbers[0] * TOKEN_BYTES:
        raise _MalformedError("its stored length differs from its description")
    return records["data/0"], numbers[0]


def _numbers(description: re.Match[bytes]) -> list[int]:
    """The length of the storage and that of the tensor."""
    groups = (group for group in description.groups() if group is not None)
    return [int.from_bytes(group, "little", signed=len(group) == 4) for group in groups]


@dataclass(frozen=True)
class ShardForm:
    """What is known of a shard file before it comes."""

    name: str
    max_tokens: int
    exact_tokens: int | None = None
    has_digest: bool = False  # of the whole file; else the file's own checksum of its tokens is compared


@dataclass(frozen=True)
class ShardFrame:
    """What a checked shard file has before and after its tokens."""

    before: bytes
    after: bytes
    token_count: int


class ShardStream:
    """Takes the bytes of one file in any pieces. Until `end` has agreed, its tokens are only a claim of the file."""

    def __init__(self, form: ShardForm) -> None:
        self._form = form
        self._before = bytearray()
        self._after = bytearray()
        self._half = b""  # the beginning of a token whose rest is not here yet
        self._place: tuple[int, int] | None = None  # start and number of the tokens
        self._missing = 0  # bytes of tokens still to come
        self._crc32 = 0

    def feed(self, data: bytes) -> Iterator[NDArray[np.int64]]:
        """The tokens in the next bytes, in one or several (n,) arrays. Raises DataError for what is no shard file."""
        rest = memoryview(data)
        if self._place is None:
            rest = self._find_tokens(rest)
        tokens, rest = rest[: self._missing], rest[self._missing :]
        self._missing -= len(tokens)
        if not self._form.has_digest:
            self._crc32 = zlib.crc32(tokens, self._crc32)
        yield from self._whole(tokens)
        if len(self._after) + len(rest) > MAX_CONTAINER_BYTES:
            raise DataError(f"{self._form.name} has more bytes than a shard of its tokens can have.")
        self._after += rest

    def end(self) -> ShardFrame:
        """That was all. Raises DataError when the file is not the shard that its beginning described."""
        if self._place is None or self._missing:
            raise DataError(f"{self._form.name} is not a shard file: it ends before its tokens do.")
        start, count = self._place
        around, form = _AroundTokens(bytes(self._before), count * TOKEN_BYTES, bytes(self._after)), self._form
        found = inspect_container(around, form.name, max_tokens=form.max_tokens, exact_tokens=form.exact_tokens)
        if (found.start, found.count) != (start, count):
            raise DataError(f"{self._form.name} is not a shard file: its tokens are not where its beginning says.")
        if not self._form.has_digest and found.crc32 != self._crc32:
            raise DataError(f"{self._form.name} is damaged: its tokens do not match the checksum in the file.")
        return ShardFrame(around.before, around.after, count)

    def _find_tokens(self, data: memoryview) -> memoryview:
        """Collect the beginning of the file; what of these bytes comes after it."""
        known = len(self._before)
        self._before += data[: MAX_CONTAINER_BYTES - known]
        place = expected_place(self._before)
        if place is None or place[0] > len(self._before):
            if len(self._before) == MAX_CONTAINER_BYTES:
                raise DataError(f"{self._form.name} is not a shard file: its beginning describes no tokens.")
            return data[len(data) :]
        start, count = place
        check_token_count(self._form.name, count, self._form.max_tokens, self._form.exact_tokens)
        self._place, self._missing = place, count * TOKEN_BYTES
        del self._before[start:]
        return data[start - known :]

    def _whole(self, data: memoryview) -> Iterator[NDArray[np.int64]]:
        """The tokens that are complete."""
        if self._half:
            wanted = TOKEN_BYTES - len(self._half)
            self._half += data[:wanted]
            data = data[wanted:]
            if len(self._half) < TOKEN_BYTES:
                return
            yield np.frombuffer(self._half, dtype="<i8")
        count = len(data) // TOKEN_BYTES
        self._half = bytes(data[count * TOKEN_BYTES :])
        if count:
            yield np.frombuffer(data, dtype="<i8", count=count)


class _AroundTokens:
    """A shard file whose tokens cannot be read."""

    def __init__(self, before: bytes, token_bytes: int, after: bytes) -> None:
        self.before = before
        self.after = after
        self._after_at = len(before) + token_bytes
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Of the places that are asked for: from the beginning, or the end itself."""
        self._at = offset if whence == io.SEEK_SET else self._after_at + len(self.after) + offset
        return self._at

    def read(self, size: int, /) -> bytes:
        """Nothing where the tokens are."""
        if self._at < self._after_at:
            return self.before[self._at : self._at + size]
        return self.after[self._at - self._after_at : self._at - self._after_at + size]
