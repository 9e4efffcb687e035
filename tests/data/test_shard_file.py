"""Shard files: ids alone, tensors that torch writes and reads, and what hostile containers try."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.data.shard_file import (
    MAX_CONTAINER_BYTES,
    ShardForm,
    ShardFormat,
    map_shard,
    read_shard,
    shard_bytes,
)
from neuroshard.errors import DataError


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def form_of(max_tokens: int, exact_tokens: int | None, shard_format: ShardFormat = "pt") -> ShardForm:
    return ShardForm(f"x.{shard_format}", shard_format, max_tokens, 2**31, exact_tokens)


def mapped(data: bytes, form: ShardForm) -> np.ndarray:
    with TemporaryDirectory() as folder:
        path = Path(folder) / form.name
        path.write_bytes(data)
        return np.array(map_shard(path, form))


def tokens_of(data: bytes, *, max_tokens: int = 100, exact_tokens: int | None = None) -> np.ndarray:
    """The tokens, read from memory and mapped alike. Raises DataError when either refuses."""
    form = form_of(max_tokens, exact_tokens)
    found = mapped(data, form)
    assert np.array_equal(read_shard(data, form), found)
    return found


def refused(data: bytes, words: str, *, max_tokens: int = 100, exact_tokens: int | None = None) -> None:
    """Both ways of reading refuse a file, neither because of the other."""
    form = form_of(max_tokens, exact_tokens)
    with pytest.raises(DataError, match=words):
        mapped(data, form)
    with pytest.raises(DataError, match=words):
        read_shard(data, form)


@pytest.mark.parametrize(("largest", "size"), [(0, 2), (65_535, 2), (65_536, 4), (2**31 - 1, 4)])
def test_a_plain_file_is_the_ids_and_nothing_else(largest: int, size: int) -> None:
    tokens = np.array([1, largest, 7])
    data = shard_bytes(tokens, "bin")
    assert data == b"".join(int(token).to_bytes(size, "little") for token in tokens)
    form = form_of(3, 3, "bin")
    for found in (mapped(data, form), read_shard(data, form)):
        assert found.dtype == np.dtype(f"<u{size}")
        assert np.array_equal(found, tokens)


@pytest.mark.parametrize("size", [0, 1, 5, 7, 11, 13, 24])
def test_a_plain_file_of_another_size_is_refused(size: int) -> None:
    form = form_of(3, 3, "bin")
    with pytest.raises(DataError, match="3 tokens take 6 or 12"):
        read_shard(bytes(size), form)
    with pytest.raises(DataError, match="3 tokens take 6 or 12"):
        mapped(bytes(size), form)


@pytest.mark.parametrize("shard_format", ["bin", "pt"])
def test_only_ids_are_written(shard_format: ShardFormat) -> None:
    for tokens in (np.array([1, -1]), np.array([], dtype=np.int64), np.ones((2, 2), dtype=np.int64)):
        with pytest.raises(ValueError, match="ids"):
            shard_bytes(tokens, shard_format)


def test_negative_ids_are_refused() -> None:
    refused(saved(torch.tensor([1, 2, -(2**63)])), "negative")


@pytest.mark.parametrize("count", [1, 100, 255, 256, 65_535, 65_536, 70_000])
def test_reads_what_torch_writes(count: int) -> None:
    tensor = torch.arange(count)
    assert np.array_equal(tokens_of(saved(tensor), max_tokens=count, exact_tokens=count), tensor.numpy())


@pytest.mark.parametrize("count", [1, 255, 256, 65_535, 65_536, 300_000])
def test_torch_reads_what_we_write_and_so_do_we(tmp_path: Path, count: int) -> None:
    tokens = np.arange(count)[::-1] * 3
    path = tmp_path / "shard_0.pt"
    path.write_bytes(shard_bytes(tokens, "pt"))
    assert np.array_equal(torch.load(path, weights_only=True).numpy(), tokens)
    assert np.array_equal(torch.load(path, weights_only=True, mmap=True).numpy(), tokens)
    assert np.array_equal(tokens_of(path.read_bytes(), max_tokens=count), tokens)


def test_equal_tokens_give_equal_bytes() -> None:
    assert shard_bytes(np.arange(1000), "pt") == shard_bytes(np.arange(1000, dtype=np.int32), "pt")


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
    refused(rezip(shard_bytes(np.arange(10), "pt"), change), "not a shard file")


def test_refuses_compressed_entries() -> None:
    data = rezip(shard_bytes(np.zeros(1000, dtype=np.int64), "pt"), lambda _: None, zipfile.ZIP_DEFLATED)
    refused(data, "not a shard file", max_tokens=10_000)


def test_refuses_two_entries_of_one_name() -> None:
    buffer = io.BytesIO(shard_bytes(np.arange(10), "pt"))
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "a") as container:
        warnings.simplefilter("ignore")
        container.writestr("archive/data/0", bytes(80))
    refused(buffer.getvalue(), "same name")


def test_refuses_overlapping_entries() -> None:
    data = bytearray(shard_bytes(np.arange(10), "pt"))
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"archive/data/0"))
    data[at + 20 : at + 28] = struct.pack("<LL", 88, 88)  # one token more, reaching into the next entry
    local = data.index(b"archive/data/0") - 30
    data[local + 18 : local + 26] = struct.pack("<LL", 88, 88)
    refused(bytes(data), "not a shard file")


def test_refuses_an_entry_that_begins_in_another_one() -> None:
    data = bytearray(shard_bytes(np.arange(10), "pt"))
    of_tokens, of_pickle = (
        data.rindex(b"PK\x01\x02", 0, data.rindex(name)) for name in (b"archive/data/0", b"archive/data.pkl")
    )
    data[of_tokens + 42 : of_tokens + 46] = data[of_pickle + 42 : of_pickle + 46]  # the place of the entry
    refused(bytes(data), "not a shard file")


def test_refuses_a_huge_declared_size_without_allocating() -> None:
    data = bytearray(shard_bytes(np.arange(10), "pt"))
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"archive/data.pkl"))
    for place in (at + 20, data.index(b"archive/data.pkl") - 30 + 18):
        data[place : place + 8] = struct.pack("<LL", 0xFFFFFFF0, 0xFFFFFFF0)
    refused(bytes(data), "not a shard file")


@pytest.mark.parametrize("field", [24, 32, 40, 48])
def test_refuses_a_lying_zip64_directory(field: int) -> None:
    data = bytearray(saved(torch.arange(10)))
    at = data.rindex(b"PK\x06\x06") + field
    data[at : at + 8] = struct.pack("<Q", 2**60)
    refused(bytes(data), "not a shard file")


def test_refuses_wrong_sizes() -> None:
    refused(shard_bytes(np.arange(10), "pt"), "exactly 11", max_tokens=11, exact_tokens=11)
    refused(shard_bytes(np.arange(10), "pt"), "10 tokens", max_tokens=9)
    refused(shard_bytes(np.arange(20_000), "pt"), "more than a shard|20000 tokens", max_tokens=10)


@pytest.mark.parametrize(
    "data",
    [b"", shard_bytes(np.arange(10), "pt")[:200], shard_bytes(np.arange(10), "pt")[:-1], bytes(MAX_CONTAINER_BYTES)],
)
def test_refuses_what_is_no_container(data: bytes) -> None:
    refused(data, "not a shard file")


def test_a_flipped_token_is_found_without_a_digest() -> None:
    data = bytearray(shard_bytes(np.arange(100), "pt"))
    data[data.index(np.arange(100).astype("<i8").tobytes()) + 5] ^= 1
    refused(bytes(data), "CRC")


def test_refuses_a_description_that_would_allocate_memory() -> None:
    code = b"\x80\x02c__builtin__\nbytearray\nq\x00J\xff\xff\xff\x7f\x85q\x01Rq\x02."
    refused(rezip(shard_bytes(np.arange(10), "pt"), put("archive/data.pkl", code)), "description")


@settings(max_examples=300)
@given(data=st.data(), by_us=st.booleans())
def test_damage_gives_the_same_tokens_or_an_error(data: st.DataObject, by_us: bool) -> None:
    tokens = np.arange(50)
    damaged = bytearray(shard_bytes(tokens, "pt") if by_us else saved(torch.from_numpy(tokens)))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = tokens_of(bytes(damaged[: data.draw(st.integers(len(damaged) - 3, len(damaged)))]))
    except DataError:
        return
    assert np.array_equal(found, tokens)
