"""Shard files: what torch writes and reads, and what hostile containers try."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.data.shard_file import MAX_CONTAINER_BYTES, ShardForm, ShardStream, read_shard, shard_bytes
from neuroshard.errors import DataError


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def streamed(data: bytes, cuts: Sequence[int], max_tokens: int, exact_tokens: int | None = None) -> np.ndarray:
    """The tokens of a file that comes in pieces, ending at the cuts."""
    stream = ShardStream(ShardForm("x.pt", max_tokens, exact_tokens))
    bounds = [0, *sorted(cuts), len(data)]
    parts = [np.array(part) for start, stop in pairwise(bounds) for part in stream.feed(data[start:stop])]
    assert sum(len(part) for part in parts) == stream.end().token_count
    return np.concatenate(parts)


def tokens_of(data: bytes, *, max_tokens: int = 100, exact_tokens: int | None = None) -> np.ndarray:
    """The tokens, read from memory and from a stream alike. Raises DataError when either refuses."""
    found = streamed(data, range(0, len(data), 1_001), max_tokens, exact_tokens)
    assert np.array_equal(read_shard(data, "x.pt", max_tokens=max_tokens, exact_tokens=exact_tokens), found)
    return found


def refused(data: bytes, words: str, *, max_tokens: int = 100, exact_tokens: int | None = None) -> None:
    """Both ways of reading refuse a file, neither because of the other."""
    with pytest.raises(DataError, match=words):
        streamed(data, (), max_tokens, exact_tokens)
    with pytest.raises(DataError, match=words):
        read_shard(data, "x.pt", max_tokens=max_tokens, exact_tokens=exact_tokens)


@pytest.mark.parametrize("count", [1, 100, 255, 256, 65_535, 65_536, 70_000])
def test_reads_what_torch_writes(count: int) -> None:
    tensor = torch.arange(count)
    assert np.array_equal(tokens_of(saved(tensor), max_tokens=count, exact_tokens=count), tensor.numpy())


@given(cuts=st.lists(st.integers(0, len(saved(torch.arange(50))))), by_torch=st.booleans())
def test_a_stream_gives_the_same_tokens_however_it_is_cut(cuts: list[int], by_torch: bool) -> None:
    tokens = np.arange(50) - 10
    data = saved(torch.from_numpy(tokens)) if by_torch else shard_bytes(tokens)
    assert np.array_equal(streamed(data, [min(cut, len(data)) for cut in cuts], 50), tokens)


@pytest.mark.parametrize("count", [1, 255, 256, 65_535, 65_536, 300_000])
def test_torch_reads_what_we_write_and_so_do_we(tmp_path: Path, count: int) -> None:
    tokens = np.arange(count)[::-1] * 3
    path = tmp_path / "shard_0.pt"
    path.write_bytes(shard_bytes(tokens))
    assert np.array_equal(torch.load(path, weights_only=True).numpy(), tokens)
    assert np.array_equal(torch.load(path, weights_only=True, mmap=True).numpy(), tokens)
    assert np.array_equal(tokens_of(path.read_bytes(), max_tokens=count), tokens)


def test_equal_tokens_give_equal_bytes() -> None:
    assert shard_bytes(np.arange(1000)) == shard_bytes(np.arange(1000, dtype=np.int32))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(10, dtype=torch.int32),
        torch.arange(10, dtype=torch.float64),
        torch.arange(12).reshape(3, 4),
        torch.arange(20)[::2],
        torch.arange(20)[:10],
        torch.arange(10).to(torch.float64).requires_grad_(),
        {"a": torch.arange(10)},
        [torch.arange(10), torch.arange(10)],
    ],
)
def test_refuses_other_tensors(tensor: object) -> None:
    refused(saved(tensor), r"x\.pt")


def test_refuses_the_old_torch_format() -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(10), buffer, _use_new_zipfile_serialization=False)
    refused(buffer.getvalue(), "not a shard file")


def rezip(data: bytes, change: Callable[[dict[str, bytes]], None], method: int = zipfile.ZIP_STORED) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as container:
        entries = {name: container.read(name) for name in container.namelist()}
    change(entries)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as container:
        for name, content in entries.items():
            container.writestr(name, content)
    return buffer.getvalue()


class Bomb:
    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return (Path.touch, (Path("/tmp/never"),))


def put(name: str, content: bytes) -> Callable[[dict[str, bytes]], None]:
    def change(entries: dict[str, bytes]) -> None:
        entries[name] = content

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("archive/data.pkl", pickle.dumps(Bomb())),
        put("archive/data.pkl", b"\x80\x02."),
        put("archive/data.pkl", bytes(10_000)),
        put("archive/data/1", bytes(80)),
        put("archive/data/0", bytes(72)),
        put("archive/data/0", bytes(81)),
        put("archive/byteorder", b"big"),
        put("other/version", b"3\n"),
        put("archive/code/evil.py", b"print()"),
        put("../archive/x", b""),
        lambda entries: entries.pop("archive/data.pkl"),
        lambda entries: entries.pop("archive/data/0"),
    ],
)
def test_refuses_changed_containers(change: Callable[[dict[str, bytes]], None]) -> None:
    refused(rezip(shard_bytes(np.arange(10)), change), "not a shard file")


def test_refuses_compressed_entries() -> None:
    data = rezip(shard_bytes(np.zeros(1000, dtype=np.int64)), lambda _: None, zipfile.ZIP_DEFLATED)
    refused(data, "not a shard file", max_tokens=10_000)


def test_refuses_two_entries_of_one_name() -> None:
    buffer = io.BytesIO(shard_bytes(np.arange(10)))
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "a") as container:
        warnings.simplefilter("ignore")
        container.writestr("archive/data/0", bytes(80))
    refused(buffer.getvalue(), "same name")


def test_refuses_overlapping_entries() -> None:
    data = bytearray(shard_bytes(np.arange(10)))
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"archive/data/0"))
    data[at + 20 : at + 28] = struct.pack("<LL", 88, 88)  # one token more, reaching into the next entry
    local = data.index(b"archive/data/0") - 30
    data[local + 18 : local + 26] = struct.pack("<LL", 88, 88)
    refused(bytes(data), "overlap")


def test_refuses_a_huge_declared_size_without_allocating() -> None:
    data = bytearray(shard_bytes(np.arange(10)))
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"archive/data.pkl"))
    for place in (at + 20, data.index(b"archive/data.pkl") - 30 + 18):
        data[place : place + 8] = struct.pack("<LL", 0xFFFFFFF0, 0xFFFFFFF0)
    refused(bytes(data), "not a shard file")


@pytest.mark.parametrize("field", [24, 32, 40, 48])
def test_refuses_a_lying_zip64_directory(field: int) -> None:
    data = bytearray(saved(torch.arange(10)))
    at = data.rindex(b"PK\x06\x06") + field
    data[at : at + 8] = struct.pack("<Q", 2**60)
    refused(bytes(data), "zip64")


def test_refuses_wrong_sizes() -> None:
    refused(shard_bytes(np.arange(10)), "exactly 11", max_tokens=11, exact_tokens=11)
    refused(shard_bytes(np.arange(10)), "10 tokens", max_tokens=9)
    refused(shard_bytes(np.arange(20_000)), "more than a shard|20000 tokens", max_tokens=10)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "before its tokens do"),
        (shard_bytes(np.arange(10))[:200], "before its tokens do"),
        (shard_bytes(np.arange(10))[:-1], "not a shard file"),
        (bytes(MAX_CONTAINER_BYTES), "describes no tokens"),
        (shard_bytes(np.arange(10)) + bytes(MAX_CONTAINER_BYTES), "more bytes than a shard"),
        (
            rezip(
                shard_bytes(np.arange(10)),
                lambda entries: entries.update({"archive/data.pkl": entries.pop("archive/data.pkl")}),
            ),
            "describes no tokens|before its tokens do",
        ),
    ],
)
def test_a_stream_that_is_no_shard_is_refused_and_holds_little(data: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        streamed(data, (), 100)


def test_tokens_elsewhere_than_the_beginning_says_are_refused() -> None:
    """A header of other tokens stands where no entry of the directory is."""
    data = bytearray(shard_bytes(np.arange(100)))
    name = b"a/data/0"
    false = b"PK\x03\x04" + bytes(22) + struct.pack("<HH", len(name), 0) + name
    before = data.index(b"archive/data/0") - 30
    data[before:before] = false  # the directory is moved along
    end = len(data) - 22
    offset = struct.unpack_from("<L", data, end + 16)[0] + len(false)
    struct.pack_into("<L", data, end + 16, offset)
    entry = offset
    while data[entry : entry + 4] == b"PK\x01\x02":
        sizes = struct.unpack_from("<3H", data, entry + 28)
        place = struct.unpack_from("<L", data, entry + 42)[0]
        struct.pack_into("<L", data, entry + 42, place + len(false) * (place >= before))
        entry += 46 + sum(sizes)
    assert np.array_equal(read_shard(bytes(data), "x.pt", max_tokens=100), np.arange(100))
    with pytest.raises(DataError, match="not a shard file"):
        streamed(bytes(data), (), 100)


def test_flipped_token_is_found_without_a_manifest() -> None:
    data = bytearray(shard_bytes(np.arange(100)))
    data[data.index(np.arange(100).astype("<i8").tobytes()) + 5] ^= 1
    with pytest.raises(DataError, match="checksum"):
        streamed(bytes(data), (), 100)


@settings(max_examples=300)
@given(data=st.data(), by_torch=st.booleans())
def test_damage_gives_the_same_tokens_or_an_error(data: st.DataObject, by_torch: bool) -> None:
    tokens = np.arange(50)
    damaged = bytearray(saved(torch.from_numpy(tokens)) if by_torch else shard_bytes(tokens))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = streamed(bytes(damaged[: data.draw(st.integers(len(damaged) - 3, len(damaged)))]), (), 100)
    except DataError:
        return
    assert np.array_equal(found, tokens)
