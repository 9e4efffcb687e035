"""Opening a source: trust, pins, growth, tokenizer, and how few bytes a node needs of a huge data set."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import anyio
import pytest

from benchmarks.huge_source import HugeSource, know_ten_shards
from neuroshard.config.run_parameters import GenesisPins
from neuroshard.data.data_set import Genesis, open_genesis
from neuroshard.data.manifest import UNKNOWN_SOURCE, ManifestTrust
from neuroshard.errors import DataError
from neuroshard.types import ShardId
from tests.worlds import file_servers as hostile
from tests.worlds.data_sets import TOKENIZER, VOCABULARY, TestSigner, folder_files, make_fetcher, write_genesis
from tests.worlds.file_servers import Behaviour, HostileServer

T = TypeVar("T")


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        with anyio.fail_after(20):
            return await work()

    return anyio.run(bounded, backend="trio")


def open_at(
    location: str | Path, store: Path, *, trust: ManifestTrust = UNKNOWN_SOURCE, pins: GenesisPins | None = None
) -> Genesis:
    async def work() -> Genesis:
        fetcher = make_fetcher(location)
        try:
            return await open_genesis(fetcher, store, trust=trust, pins=pins, give_up_after=3)
        finally:
            await fetcher.source.aclose()

    return run(work)


def digest_of(genesis: Genesis, shard: int) -> bytes | None:
    async def work() -> bytes | None:
        return await genesis.shard_digest(ShardId(shard))

    return run(work)


def test_signed_folder_is_verified(tmp_path: Path) -> None:
    write_genesis(tmp_path / "g", signer=TestSigner())
    genesis = open_at(tmp_path / "g", tmp_path / "store")
    assert genesis.verified
    assert genesis.explanation.startswith("Verified")
    assert genesis.tokenizer == TOKENIZER
    assert digest_of(genesis, 5) == sha256((tmp_path / "g" / "shard_5.bin").read_bytes()).digest()


def test_minimal_folder_is_unverified(tmp_path: Path) -> None:
    write_genesis(tmp_path / "g")
    (tmp_path / "g" / "manifest.json").write_text(json.dumps({"total_shards": 16, "total_tokens": 6400}))
    shutil.rmtree(tmp_path / "g" / "pages")
    genesis = open_at(tmp_path / "g", tmp_path / "store")
    assert not genesis.verified
    assert "Unverified" in genesis.explanation
    assert digest_of(genesis, 0) is None
    pins = genesis.pins(VOCABULARY)
    assert pins.signing_key is None
    (tmp_path / "g" / "manifest.json").write_text(json.dumps({"total_shards": 20, "total_tokens": 8000}))
    assert open_at(tmp_path / "g", tmp_path / "other", pins=pins).manifest.total_shards == 16
    (tmp_path / "g" / "manifest.json").write_text(json.dumps({"total_shards": 3}))
    with pytest.raises(DataError, match="created with 16"):
        open_at(tmp_path / "g", tmp_path / "third", pins=pins)
    assert open_at(tmp_path / "g", tmp_path / "store", pins=pins).manifest.total_shards == 16  # its own copy


def test_a_pinned_run_continues_when_the_data_set_grows(tmp_path: Path) -> None:
    write_genesis(tmp_path / "g", shards=16, signer=TestSigner())
    before = open_at(tmp_path / "g", tmp_path / "store")
    pins = before.pins(VOCABULARY)
    write_genesis(tmp_path / "g", shards=40, signer=TestSigner(), tokenizer=b"{ }", next_merge_id=2000)
    for store in ("store", "a new node"):
        after = open_at(tmp_path / "g", tmp_path / store, pins=pins)
        assert after.manifest.total_shards == 16
        assert after.verified
        assert after.tokenizer == TOKENIZER
        assert after.pins(VOCABULARY) == pins
        assert digest_of(after, 15) == digest_of(before, 15)
    assert open_at(tmp_path / "g", tmp_path / "a new run").manifest.total_shards == 40


def test_growth_in_the_middle_of_a_run_disturbs_nobody(tmp_path: Path) -> None:
    write_genesis(tmp_path / "g", shards=16, signer=TestSigner())
    genesis = open_at(tmp_path / "g", tmp_path / "store")
    write_genesis(tmp_path / "g", shards=17, signer=TestSigner())
    assert digest_of(genesis, 15) == sha256((tmp_path / "g" / "shard_15.bin").read_bytes()).digest()


def test_a_pinned_run_opens_without_its_source(tmp_path: Path) -> None:
    for signer in (TestSigner(), None):
        name = "signed" if signer else "unsigned"
        write_genesis(tmp_path / name, signer=signer)
        store = tmp_path / f"store-{name}"
        first = open_at(tmp_path / name, store)
        digest_of(first, 3)
        (tmp_path / "empty").mkdir(exist_ok=True)
        again = open_at(tmp_path / "empty", store, pins=first.pins(VOCABULARY))
        assert again.manifest.pages == first.manifest.pages
        assert again.verified == first.verified
        assert digest_of(again, 3) == digest_of(first, 3)


def test_damaged_copies_are_fetched_again(tmp_path: Path) -> None:
    write_genesis(tmp_path / "g", signer=TestSigner())
    first = open_at(tmp_path / "g", tmp_path / "store")
    digest = digest_of(first, 3)
    for copy in (tmp_path / "store").iterdir():
        copy.write_bytes(copy.read_bytes()[:-1])
    again = open_at(tmp_path / "g", tmp_path / "store", pins=first.pins(VOCABULARY))
    assert digest_of(again, 3) == digest
    assert digest_of(open_at(tmp_path / "g", tmp_path / "store", pins=first.pins(VOCABULARY)), 3) == digest


@pytest.mark.parametrize("change", ["root", "total_shards", "signing_key", "tokenizer_sha256"])
def test_another_data_set_than_the_pinned_one_is_refused(tmp_path: Path, change: str) -> None:
    write_genesis(tmp_path / "g", signer=TestSigner())
    pins = open_at(tmp_path / "g", tmp_path / "a").pins(VOCABULARY)
    wrong = {"root": "00" * 32, "total_shards": 12, "signing_key": "00" * 32, "tokenizer_sha256": "00" * 32}
    with pytest.raises(DataError):
        open_at(tmp_path / "g", tmp_path / "b", pins=replace(pins, **{change: wrong[change]}))


def test_rewritten_history_is_refused(tmp_path: Path) -> None:
    """A grown data set, validly signed, whose earlier shards are others."""
    write_genesis(tmp_path / "g", shards=16, signer=TestSigner())
    pins = open_at(tmp_path / "g", tmp_path / "a").pins(VOCABULARY)
    shutil.rmtree(tmp_path / "g")
    write_genesis(tmp_path / "g", shards=20, tokens=401, signer=TestSigner())
    with pytest.raises(DataError, match="another data set"):
        open_at(tmp_path / "g", tmp_path / "b", pins=pins)


TABLE_NAME = f"tokenizers/{sha256(TOKENIZER).hexdigest()}.json"


@pytest.mark.parametrize("name", ["manifest.json", TABLE_NAME, "pages/00000.bin"])
@pytest.mark.parametrize(
    "trouble",
    [
        [hostile.answers(500)] * 2,
        [hostile.answers(404)],
        [hostile.serves(b"")],
        [hostile.serves(b"x" * 100)],
        [hostile.serves(b"{}" * 10_000_000)],
        [hostile.never_ends],
        [hostile.drops_after(20)] * 3,
    ],
)
def test_description_files_survive_trouble(tmp_path: Path, name: str, trouble: list[Behaviour]) -> None:
    write_genesis(tmp_path / "g", signer=TestSigner())
    with HostileServer(folder_files(tmp_path / "g")) as server:
        server.behaviours[name] = list(trouble)

        async def work() -> bytes | None:
            fetcher = make_fetcher(server.url)
            genesis = await open_genesis(fetcher, tmp_path / "store")
            digest = await genesis.shard_digest(ShardId(2))
            await fetcher.source.aclose()
            return digest

        assert run(work) == sha256(server.files["shard_2.bin"]).digest()


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("manifest.json", None, "has no manifest.json"),
        ("manifest.json", b"{}", "malformed"),
        ("manifest.json", b"x" * 2_000_000, "would have 2000000 bytes"),
        ("tokenizer.json", None, "tokenizer of this run"),
        ("tokenizer.json", b"{}", "tokenizer of this run"),
    ],
)
def test_what_stays_wrong_ends_with_a_data_error(tmp_path: Path, name: str, body: bytes | None, words: str) -> None:
    write_genesis(tmp_path / "g", signer=TestSigner())
    files = folder_files(tmp_path / "g")
    for key in [key for key in files if key.startswith("tokenizers/")]:
        del files[key]
    files.pop(name) if body is None else files.update({name: body})
    with HostileServer(files) as server, pytest.raises(DataError, match=words):
        open_at(server.url, tmp_path / "store")


def test_tables_are_asked_for_by_their_digests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest one, and the one of an older run: nothing is fetched in vain, nothing is called damaged."""
    write_genesis(tmp_path / "g", shards=16, signer=TestSigner())
    pins = open_at(tmp_path / "g", tmp_path / "a").pins(VOCABULARY)
    grown = b'{"next_merge_id": 1001, "merges": []}'
    write_genesis(tmp_path / "g", shards=20, signer=TestSigner(), tokenizer=grown, next_merge_id=VOCABULARY + 1)
    with HostileServer(folder_files(tmp_path / "g")) as server:
        assert open_at(server.url, tmp_path / "b", pins=pins).tokenizer == TOKENIZER
        assert open_at(server.url, tmp_path / "c").tokenizer == grown
        tables = [name for name, _ in server.requests if "tokenizer" in name]
    assert tables == [TABLE_NAME, f"tokenizers/{sha256(grown).hexdigest()}.json"]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_folder_whose_only_table_is_not_named_by_its_digest(tmp_path: Path) -> None:
    write_genesis(tmp_path / "g", signer=TestSigner())
    files = folder_files(tmp_path / "g")
    del files[TABLE_NAME]
    with HostileServer(files) as server:
        assert open_at(server.url, tmp_path / "b").tokenizer == TOKENIZER


def test_a_replaced_manifest_is_refused_at_start(tmp_path: Path) -> None:
    write_genesis(tmp_path / "g", signer=TestSigner(2))
    key = TestSigner(1).public_key.hex()
    with pytest.raises(DataError, match="trusts"):
        open_at(tmp_path / "g", tmp_path / "store", trust=ManifestTrust(signing_key=key))


def test_600_000_shards_cost_a_node_less_than_half_a_megabyte(tmp_path: Path) -> None:
    source = HugeSource()
    assert run(lambda: know_ten_shards(source, tmp_path))
    assert source.bytes_sent < 500_000
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 500_000
