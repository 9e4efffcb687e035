"""run.json beside a manifest: `run publish` writes it, nodes believe it when the key of the manifest signed it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from benchmarks.node_process import TOKEN
from neuroshard.config.run_parameters import MAX_SEEDS
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.manifest import parse_manifest, serialise_manifest
from neuroshard.data.source import open_source
from neuroshard.errors import DataError, StorageError, UsageError
from neuroshard.identity import TokenSecret, Wallet, canonical_json, parse_token, sign_json
from neuroshard.runs.creation import Owner, create_run, update_run
from neuroshard.runs.default_run import (
    MAX_RUN_FILE_BYTES,
    DefaultRun,
    default_run_of,
    publish_run,
    read_default_run,
    write_default_run,
)
from neuroshard.runs.offer import RunOffer
from neuroshard.types import RunId

WALLET = Wallet.from_secret(parse_token(TOKEN))
KEY = WALLET.public_key.hex()
STRANGER = Wallet.from_secret(TokenSecret("hex", bytes(32)))
SEEDS = tuple(
    f"/ip4/192.0.2.{number}/tcp/4001/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB" for number in (1, 2)
)
RUN = DefaultRun(RunId("12" * 32), "07" * 32, SEEDS)


@pytest.fixture
def genesis(small_genesis: Path, tmp_path: Path) -> Path:
    """A signed Genesis folder, ours to change."""
    return shutil.copytree(small_genesis, tmp_path / "genesis")


@pytest.fixture
def made(small_genesis: Path, tmp_path: Path) -> RunOffer:
    """A run on that data; its owner is not the one who signed the data."""
    config = {"name": "friends", "architecture": {"depth": 2, "sequence_length": 64}}
    return create_run(Owner(STRANGER, tmp_path / "owner"), config, str(small_genesis)).offer


def found_at(genesis: Path) -> DefaultRun | None:
    """What a node finds that opens this folder."""
    key = parse_manifest((genesis / "manifest.json").read_bytes()).signing_key
    return trio.run(default_run_of, Fetcher(open_source(str(genesis))), key)


def signed(value: Any, wallet: Wallet = WALLET) -> bytes:
    return canonical_json({**value, "signature": sign_json(wallet, value)})


VALUE = {"run_id": "12" * 32, "owner_public_key": "07" * 32, "seeds": list(SEEDS)}


def test_what_the_signer_of_the_data_wrote_is_read(genesis: Path) -> None:
    (genesis / "run.json").write_bytes(write_default_run(RUN, WALLET))
    assert found_at(genesis) == RUN
    assert write_default_run(RUN, WALLET) == signed(VALUE)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (signed({**VALUE, "run_id": "13" * 32}).replace(b"13" * 32, b"12" * 32), "signature"),
        (signed(VALUE).replace(b"192.0.2.1", b"192.0.2.9"), "signature"),
        (signed(VALUE, STRANGER), "signature"),
        (canonical_json(VALUE), "signature"),
        (signed({**VALUE, "more": 1}), "more"),
        (signed({**VALUE, "run_id": "12" * 31}), "run_id"),
        (signed({**VALUE, "run_id": 12}), "run_id"),
        (signed({**VALUE, "owner_public_key": "zz" * 32}), "owner_public_key"),
        (signed({**VALUE, "seeds": "no list"}), "seeds"),
        (signed({**VALUE, "seeds": ["/ip4/192.0.2.1/tcp/4001"]}), "/p2p/"),
        (signed({**VALUE, "seeds": list(SEEDS) * MAX_SEEDS}), "seeds"),
        (b"", "run.json"),
        (b"[]", "run.json"),
        (b"\xff\xfe{}", "run.json"),
        (b'{"run_id": NaN}', "run.json"),
        (b"[" * 8000, "run.json"),
        (signed(VALUE) + b" " * MAX_RUN_FILE_BYTES, "run.json"),
    ],
)
def test_anything_else_is_refused_and_training_begins_without_it(
    data: bytes, problem: str, genesis: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match=problem) as refused:
        read_default_run(data, KEY)
    assert len(str(refused.value)) < 500
    (genesis / "run.json").write_bytes(data)
    with caplog.at_level(logging.CRITICAL):
        assert found_at(genesis) is None


def test_no_file_and_a_file_that_is_no_file_are_no_default_run(genesis: Path) -> None:
    assert found_at(genesis) is None
    (genesis / "run.json").mkdir()
    assert found_at(genesis) is None


def test_data_that_nobody_signed_name_no_run(genesis: Path) -> None:
    (genesis / "run.json").write_bytes(write_default_run(RUN, WALLET))
    unsign(genesis)
    assert found_at(genesis) is None


def test_a_source_that_does_not_answer_keeps_nobody_from_training() -> None:
    class Silent(Fetcher):
        async def fetch_bytes(self, request: object, check: Callable[[bytes], Any]) -> Any:  # type: ignore[override]
            await trio.sleep_forever()

    async def main() -> None:
        started = trio.current_time()
        assert await default_run_of(Silent(open_source("http://127.0.0.1:9")), KEY) is None
        assert trio.current_time() - started < 10

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_published_run_is_found_beside_its_data(genesis: Path, made: RunOffer) -> None:
    done = publish_run(WALLET, made, genesis, [*SEEDS, SEEDS[0]])
    assert done.replaced is None
    assert done.run == DefaultRun(made.run_id, STRANGER.public_key.hex(), SEEDS)
    assert found_at(genesis) == done.run
    assert done.file == genesis / "run.json"
    assert done.file.stat().st_mode & 0o444 == 0o444
    assert publish_run(WALLET, made, genesis, SEEDS[:1]).replaced is None  # the same run with another seed
    found = found_at(genesis)
    assert found is not None
    assert found.seeds == SEEDS[:1]


def test_the_seeds_of_a_run_are_those_of_its_default(genesis: Path, made: RunOffer, tmp_path: Path) -> None:
    changed = update_run(
        Owner(STRANGER, tmp_path / "owner"), made, {"seeds": list(SEEDS), "holds_from_outer_step": 1}
    ).offer
    assert publish_run(WALLET, changed, genesis, []).run.seeds == SEEDS


def test_another_run_takes_the_place_of_the_first(genesis: Path, made: RunOffer) -> None:
    (genesis / "run.json").write_bytes(write_default_run(RUN, WALLET))
    assert publish_run(WALLET, made, genesis, SEEDS).replaced == RUN
    found = found_at(genesis)
    assert found is not None
    assert found.run_id == made.run_id


def test_only_the_wallet_that_signed_the_data_publishes(genesis: Path, made: RunOffer) -> None:
    with pytest.raises(UsageError, match=f"signed by wallet {WALLET.wallet_id}, not by {STRANGER.wallet_id}"):
        publish_run(STRANGER, made, genesis, SEEDS)
    assert not (genesis / "run.json").exists()


def test_data_that_are_not_those_of_the_run_are_refused(genesis: Path, made: RunOffer) -> None:
    manifest = parse_manifest((genesis / "manifest.json").read_bytes())
    (genesis / "manifest.json").write_bytes(serialise_manifest(replace(manifest, pages=("00" * 32,)), WALLET))
    with pytest.raises(DataError, match="created with another data set"):
        publish_run(WALLET, made, genesis, SEEDS)
    unsign(genesis)
    with pytest.raises(DataError, match="not signed"):
        publish_run(WALLET, made, genesis, SEEDS)
    with pytest.raises(DataError, match=r"manifest\.json"):
        publish_run(WALLET, made, genesis / "nothing", SEEDS)
    assert not (genesis / "run.json").exists()


def test_what_is_no_default_run_is_not_written_over(genesis: Path, made: RunOffer) -> None:
    (genesis / "run.json").write_bytes(made.to_json())  # as `run create --out run.json` leaves it
    with pytest.raises(UsageError, match="not overwritten"):
        publish_run(WALLET, made, genesis, SEEDS)
    assert (genesis / "run.json").read_bytes() == made.to_json()


@pytest.mark.parametrize("seeds", [["nowhere"], [SEEDS[0]] * (MAX_SEEDS + 1)])
def test_seeds_that_nobody_could_use_are_told(genesis: Path, made: RunOffer, seeds: list[str]) -> None:
    with pytest.raises(UsageError, match="seed"):
        publish_run(WALLET, made, genesis, seeds)


def test_a_folder_that_cannot_be_written_is_told(
    genesis: Path, made: RunOffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("neuroshard.runs.default_run.write_atomically", refuse)
    with pytest.raises(StorageError, match="Read-only file system"):
        publish_run(WALLET, made, genesis, SEEDS)


def unsign(genesis: Path) -> None:
    manifest = json.loads((genesis / "manifest.json").read_bytes())
    del manifest["signature"]
    (genesis / "manifest.json").write_text(json.dumps(manifest))
