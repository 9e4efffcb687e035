"""The shard cache: small on disk, honest about damage, within its limit, tidy on a full disk."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from neuroshard.data.shard_cache import CachedShard, ShardCache
from neuroshard.data.shard_file import ShardForm, ShardFormat, shard_bytes
from neuroshard.errors import DataError, DiskFullError, StorageError
from neuroshard.types import ShardId
from tests.worlds.data_sets import shard_tokens

SIZE = 1000  # of a shard of 500 tokens
KEY = bytes(range(32))
IDS = 1000


def form_of(tokens: int, id_count: int = IDS, shard_format: ShardFormat = "bin") -> ShardForm:
    return ShardForm("a shard", shard_format, tokens, id_count, tokens)


def store(
    cache: ShardCache, shard: int, tokens: np.ndarray, id_count: int = IDS, shard_format: ShardFormat = "bin"
) -> CachedShard:
    """As if the file had come from a source, in two pieces that part a token."""
    data = shard_bytes(tokens, shard_format)
    with cache.writer(ShardId(shard), KEY) as writer:
        half = len(data) // 2 | 1
        writer.write(data[:half])
        writer.write(data[half:])
        return cache.take(ShardId(shard), KEY, form_of(len(tokens), id_count, shard_format), writer)


def make_cache(folder: Path, limit: int = 10**9) -> ShardCache:
    return ShardCache(folder / "cache", limit_bytes=limit)


def fill(cache: ShardCache, *shards: int, tokens: int = 500) -> None:
    for shard in shards:
        store(cache, shard, shard_tokens(shard, tokens))


def read(cache: ShardCache, shard: int, tokens: int = 500, key: bytes = KEY) -> CachedShard | None:
    return cache.get(ShardId(shard), key, form_of(tokens))


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1000, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_a_file_is_kept_and_mapped_as_it_came(tmp_path: Path, vocabulary: int, dtype: type) -> None:
    tokens = np.append(shard_tokens(0, 3_000_000), vocabulary - 1)
    cache = make_cache(tmp_path)
    stored = store(cache, 0, tokens, vocabulary)
    again = make_cache(tmp_path).get(ShardId(0), KEY, form_of(len(tokens), vocabulary))
    assert again is not None
    for shard in (stored, again):
        assert shard.tokens.dtype == dtype
        assert np.array_equal(shard.tokens, tokens)
        assert shard.largest == max(999, vocabulary - 1)
    file = cache.file(ShardId(0), KEY)
    assert file is not None
    assert file.read_bytes() == shard_bytes(tokens, "bin")
    assert cache.usage() == (1, len(tokens) * np.dtype(dtype).itemsize)
    assert not again.tokens.flags.writeable


def test_a_tensor_file_is_kept_and_mapped_as_it_came(tmp_path: Path) -> None:
    tokens = shard_tokens(0, 10_000)
    cache = make_cache(tmp_path)
    stored = store(cache, 0, tokens, shard_format="pt")
    again = make_cache(tmp_path).get(ShardId(0), KEY, form_of(len(tokens), shard_format="pt"))
    assert again is not None
    for shard in (stored, again):
        assert np.array_equal(shard.tokens, tokens)
        assert not shard.tokens.flags.writeable
    file = cache.file(ShardId(0), KEY)
    assert file is not None
    assert file.read_bytes() == shard_bytes(tokens, "pt")


@pytest.mark.parametrize("token", [1000, 2**31])
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, token: int) -> None:
    cache = make_cache(tmp_path)
    for shard_format in ("bin", "pt"):
        with pytest.raises(DataError, match=f"token id {token}"):
            store(cache, 0, np.array([1, 2, token]), shard_format=shard_format)
    assert list(cache.folder.iterdir()) == []


@pytest.mark.parametrize("token", [2**32 + 1, 2**40, 2**63 - 1, -1, -(2**63)])
def test_ids_beyond_any_plain_file_are_refused_in_a_tensor_file(tmp_path: Path, token: int) -> None:
    """Their lower 32 bits may be those of an allowed id."""
    cache = make_cache(tmp_path)
    buffer = io.BytesIO()
    torch.save(torch.tensor([1, 2, token]), buffer)
    with cache.writer(ShardId(0), KEY) as writer:
        writer.write(buffer.getvalue())
        with pytest.raises(DataError, match=f"token id {token}"):
            cache.take(ShardId(0), KEY, form_of(3, shard_format="pt"), writer)
    assert list(cache.folder.iterdir()) == []


def test_nothing_of_a_refused_attempt_is_in_the_next_one(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    good = shard_bytes(shard_tokens(1, 500), "bin")
    with cache.writer(ShardId(1), KEY) as writer:
        for bad in (shard_bytes(np.full(500, IDS), "bin"), bytes(90_000), good[:-1], b""):
            writer.write(bad)
            with pytest.raises(DataError):
                cache.take(ShardId(1), KEY, form_of(500), writer)
            writer.restart()
        assert not cache.contains(ShardId(1), KEY)
        writer.write(good)
        cache.take(ShardId(1), KEY, form_of(500), writer)
    again = read(make_cache(tmp_path), 1)
    assert again is not None
    assert np.array_equal(again.tokens, shard_tokens(1, 500))


@pytest.mark.parametrize("place", [0, 1, 500, 501, -2, -1])
def test_a_flipped_bit_is_found(tmp_path: Path, place: int) -> None:
    cache = make_cache(tmp_path)
    fill(cache, 0)
    path = next(cache.folder.iterdir())
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    assert read(cache, 0) is None
    assert cache.damaged_files == 1


@pytest.mark.parametrize("size", [0, 10, 500, 999, 1001, 2000])
def test_a_wrong_length_is_found(tmp_path: Path, size: int) -> None:
    cache = make_cache(tmp_path)
    fill(cache, 0)
    path = next(cache.folder.iterdir())
    path.write_bytes(path.read_bytes()[:size].ljust(size, b"\0"))
    assert read(cache, 0) is None
    assert not path.exists()
    assert cache.usage() == (0, 0)


def test_other_contents_have_another_key(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    fill(cache, 0)
    assert cache.contains(ShardId(0), KEY)
    assert read(cache, 0, key=bytes(32)) is None
    assert read(cache, 1) is None


def test_the_least_recently_used_goes_first_and_never_one_in_use(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    fill(cache, 0, 1, 2, 3)
    read(cache, 0)
    cache.change_limit(4 * SIZE, keep=())
    assert cache.reserve(ShardId(9), 2 * SIZE, keep={ShardId(1)})
    assert [shard for shard in range(4) if cache.contains(ShardId(shard), KEY)] == [0, 1]
    assert not cache.reserve(ShardId(8), 3 * SIZE, keep={ShardId(1)})  # only after the first reservation ends
    cache.release(ShardId(9), keep={ShardId(1)})
    assert cache.reserve(ShardId(8), 3 * SIZE, keep={ShardId(1)})
    assert cache.contains(ShardId(1), KEY)


def test_a_lower_limit_holds_at_once_and_spares_what_is_in_use(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    fill(cache, 0, 1, 2, 3)
    cache.change_limit(3 * SIZE - 1, keep={ShardId(0)})
    assert sorted(path.name.split("-")[0] for path in cache.folder.iterdir()) == ["shard_0", "shard_3"]
    cache.change_limit(1, keep={ShardId(0)})
    assert cache.usage() == (1, SIZE)


def test_a_limit_that_sinks_during_a_download_holds_when_that_ends(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    fill(cache, 0, 1)
    assert cache.reserve(ShardId(2), 2 * SIZE, keep={ShardId(1)})
    cache.change_limit(3 * SIZE, keep={ShardId(1)})
    assert cache.usage() == (1, SIZE)
    cache.change_limit(SIZE, keep={ShardId(1)})
    fill(cache, 2)
    cache.release(ShardId(2), keep=())
    assert cache.contains(ShardId(2), KEY)
    assert cache.usage() == (1, SIZE)


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    fill(cache, 0, 1)
    read(cache, 0)
    again = make_cache(tmp_path, limit=2 * SIZE)
    assert again.reserve(ShardId(9), SIZE, keep=())
    assert again.contains(ShardId(0), KEY)
    assert not again.contains(ShardId(1), KEY)


def test_a_limit_below_one_shard_is_an_error_with_numbers(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, limit=1_000_000)
    with pytest.raises(StorageError, match=r"1\.0 MB is too small: shard 5 needs 25\.0 MB.*at least 25\.0 MB"):
        cache.reserve(ShardId(5), 25_000_000, keep=())


def test_leftovers_of_a_kill_are_removed_at_start(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    fill(cache, 0)
    (cache.folder / "shard_7-00.part").write_bytes(bytes(100))
    make_cache(tmp_path)
    assert [path.suffix for path in cache.folder.iterdir()] == [".bin"]


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs POSIX resource limits")
    cache = make_cache(tmp_path)
    fill(cache, 0)
    large = shard_tokens(1, 50_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(DiskFullError, match="no space left"):
            store(cache, 1, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read(cache, 0) is not None
    assert len(list(cache.folder.iterdir())) == 1
    store(cache, 1, large)


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        make_cache(tmp_path)
