"""Shard files: what torch writes and reads, and what hostile containers try."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuroshard.data.genesis.torch_file import inspect_shard, write_shard
from neuroshard.errors import DataError


def written(tokens: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    write_shard(buffer, tokens)
    return buffer.getvalue()


@pytest.mark.parametrize("count", [1, 100, 255, 256, 65_535, 65_536, 70_000])
def test_reads_what_torch_writes(tmp_path: Path, count: int) -> None:
    tensor = torch.arange(count)
    torch.save(tensor, tmp_path / "shard_7.pt")
    record = inspect_shard(tmp_path / "shard_7.pt", max_tokens=count, exact_tokens=count)
    record.verify_checksum()
    assert np.array_equal(record.map(), tensor.numpy())
    assert record.offset % 64 == 0


@pytest.mark.parametrize("count", [1, 255, 256, 65_535, 65_536, 300_000])
def test_torch_reads_what_we_write_and_so_do_we(tmp_path: Path, count: int) -> None:
    tokens = np.arange(count)[::-1] * 3
    path = tmp_path / "shard_0.pt"
    path.write_bytes(written(tokens))
    assert np.array_equal(torch.load(path, weights_only=True).numpy(), tokens)
    assert np.array_equal(torch.load(path, weights_only=True, mmap=True).numpy(), tokens)
    record = inspect_shard(path, max_tokens=count)
    record.verify_checksum()
    assert np.array_equal(record.map(), tokens)
    assert record.offset % 64 == 0


def test_equal_tokens_give_equal_bytes() -> None:
    assert written(np.arange(1000)) == written(np.arange(1000, dtype=np.int32))


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
def test_refuses_other_tensors(tmp_path: Path, tensor: object) -> None:
    torch.save(tensor, tmp_path / "x.pt")
    with pytest.raises(DataError):
        inspect_shard(tmp_path / "x.pt", max_tokens=100)


def test_refuses_the_old_torch_format(tmp_path: Path) -> None:
    torch.save(torch.arange(10), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DataError, match="not a shard file"):
        inspect_shard(tmp_path / "x.pt", max_tokens=100)


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
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (Path.touch, (Path("/tmp/never"),))  # type: ignore[return-value]


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
def test_refuses_changed_containers(tmp_path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(rezip(written(np.arange(10)), change))
    with pytest.raises(DataError, match="not a shard file"):
        inspect_shard(path, max_tokens=100)


def test_refuses_compressed_entries(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(rezip(written(np.zeros(1000, dtype=np.int64)), lambda _: None, zipfile.ZIP_DEFLATED))
    with pytest.raises(DataError, match="compressed"):
        inspect_shard(path, max_tokens=10_000)


def test_refuses_two_entries_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(written(np.arange(10)))
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as container:
        warnings.simplefilter("ignore")
        container.writestr("archive/data/0", bytes(80))
    with pytest.raises(DataError, match="same name"):
        inspect_shard(path, max_tokens=100)


def test_refuses_overlapping_entries(tmp_path: Path) -> None:
    data = bytearray(written(np.arange(10)))
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"archive/data/0"))
    data[at + 20 : at + 28] = struct.pack("<LL", 88, 88)  # one token more, reaching into the next entry
    local = data.index(b"archive/data/0") - 30
    data[local + 18 : local + 26] = struct.pack("<LL", 88, 88)
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(DataError, match="overlap"):
        inspect_shard(path, max_tokens=100)


def test_refuses_a_huge_declared_size_without_allocating(tmp_path: Path) -> None:
    data = bytearray(written(np.arange(10)))
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"archive/data.pkl"))
    for place in (at + 20, data.index(b"archive/data.pkl") - 30 + 18):
        data[place : place + 8] = struct.pack("<LL", 0xFFFFFFF0, 0xFFFFFFF0)
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(DataError, match="not a shard file"):
        inspect_shard(path, max_tokens=100)


@pytest.mark.parametrize("field", [24, 32, 40, 48])
def test_refuses_a_lying_zip64_directory(tmp_path: Path, field: int) -> None:
    torch.save(torch.arange(10), tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    at = data.rindex(b"PK\x06\x06") + field
    data[at : at + 8] = struct.pack("<Q", 2**60)
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(DataError, match="zip64"):
        inspect_shard(tmp_path / "x.pt", max_tokens=100)


def test_refuses_wrong_sizes(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(written(np.arange(10)))
    with pytest.raises(DataError, match="exactly 11"):
        inspect_shard(path, max_tokens=11, exact_tokens=11)
    with pytest.raises(DataError, match="10 tokens"):
        inspect_shard(path, max_tokens=9)
    path.write_bytes(written(np.arange(20_000)))
    with pytest.raises(DataError, match="more than a shard"):
        inspect_shard(path, max_tokens=10)


def test_flipped_token_is_found_without_a_manifest(tmp_path: Path) -> None:
    data = bytearray(written(np.arange(100)))
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    data[inspect_shard(path, max_tokens=100).offset + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="checksum"):
        inspect_shard(path, max_tokens=100).verify_checksum()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), by_torch=st.booleans())
def test_damage_gives_the_same_tokens_or_an_error(tmp_path: Path, data: st.DataObject, by_torch: bool) -> None:
    tokens = np.arange(50)
    original = io.BytesIO()
    torch.save(torch.from_numpy(tokens), original) if by_torch else write_shard(original, tokens)
    damaged = bytearray(original.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.pt"
    path.write_bytes(damaged[: data.draw(st.integers(len(damaged) - 3, len(damaged)))])
    try:
        record = inspect_shard(path, max_tokens=100)
        record.verify_checksum()
    except DataError:
        return
    assert np.array_equal(record.map(), tokens)
