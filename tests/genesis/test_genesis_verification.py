"""What a careless or hostile place may have done to a data set: each found and named, whatever kind of place it is."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from neuroshard.cli.main import main
from neuroshard.data.manifest import MAX_PAGE_BYTES, ManifestTrust, parse_manifest, serialise_manifest
from neuroshard.data.tokenizer import TokenizerTable
from neuroshard.data.transfer import RetryPolicy
from neuroshard.dataset import GenesisServer, Verification, VerificationSample, verify_data_set
from neuroshard.dataset.destination import FolderDestination, ReadOnlyPlace, open_place
from neuroshard.dataset.http_reader import HttpReader
from neuroshard.errors import DataError, DataUnavailableError
from tests.worlds.data_sets import TestSigner, write_genesis

OLD_TABLE = TokenizerTable(tuple((10 + i, 11 + i) for i in range(64)), vocab_size=1000)
NEW_TABLE = TokenizerTable((*OLD_TABLE.merges, *((10 + i, 12 + i) for i in range(700))), vocab_size=1100)
OTHER_TABLE = TokenizerTable(tuple((10 + i, 20 + i) for i in range(200)), vocab_size=1000)
FULL_TABLE = TokenizerTable(tuple((10 + i % 250, 10 + (i * 7 + i // 250) % 250) for i in range(734)), vocab_size=1000)


def write(folder: Path, shards: int, table: TokenizerTable = FULL_TABLE) -> None:
    write_genesis(
        folder, shards=shards, signer=TestSigner(), tokenizer=table.to_json(), next_merge_id=table.next_merge_id
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "g", 6)
    return tmp_path / "g"


@pytest.fixture(params=["folder", "http"])
def check(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[], Verification]]:
    """Verify the folder, as it lies and as it is served."""
    if request.param == "folder":
        yield lambda: verify_data_set(FolderDestination(folder), trust=ManifestTrust())
        return
    with GenesisServer(folder) as server:
        place = open_place(server.url)
        yield lambda: verify_data_set(place, trust=ManifestTrust())
        place.close()


def test_a_sound_data_set_is_sound(check: Callable[[], Verification]) -> None:
    found = check()
    assert (found.problems, found.notes, found.total_shards, found.shards_checked) == ((), (), 6, 6)
    assert found.signed_by == TestSigner().public_key.hex()


def test_a_truncated_page_is_named(check: Callable[[], Verification], folder: Path) -> None:
    page = folder / "pages/00000.bin"
    page.write_bytes(page.read_bytes()[:-32])
    assert check().problems == (
        "pages/00000.bin has 160 bytes, 6 digests need 192: it is cut off, or older than the manifest.",
    )


def test_a_swapped_shard_is_named(check: Callable[[], Verification], folder: Path) -> None:
    shutil.copy(folder / "shard_4.bin", folder / "shard_2.bin")
    assert check().problems == ("shard_2.bin does not match its digest: it is shard_4.bin under a wrong name.",)


def test_damaged_cut_and_missing_shards_are_named(check: Callable[[], Verification], folder: Path) -> None:
    data = (folder / "shard_0.bin").read_bytes()
    (folder / "shard_0.bin").write_bytes(data[:-1] + b"x")
    (folder / "shard_1.bin").write_bytes(data[:100])
    (folder / "shard_2.bin").unlink()
    (folder / "shard_3.bin").write_bytes(data + bytes(100_000))
    told = check().problems
    assert told[0] == "shard_0.bin does not match its digest: it is damaged, or of another time than the manifest."
    assert told[1] == "shard_1.bin has 100 bytes, expected at least 800: it is cut off."
    assert told[2] == "shard_2.bin is missing."
    assert "shard_3.bin" in told[3]
    assert len(told) == 4


def test_a_wrong_key_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="this run trusts"):
        verify_data_set(FolderDestination(folder), trust=ManifestTrust(signing_key=TestSigner(2).public_key.hex()))
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_bytes(serialise_manifest(manifest, TestSigner(2)))
    with pytest.raises(DataError, match="is signed by"):
        verify_data_set(FolderDestination(folder), trust=ManifestTrust(signing_key=TestSigner().public_key.hex()))


def test_an_old_manifest_with_newer_shards_is_told(check: Callable[[], Verification], folder: Path) -> None:
    """What it names is all there, so it is sound; it is not the newest."""
    old = (folder / "manifest.json").read_bytes()
    write(folder, 8)
    (folder / "manifest.json").write_bytes(old)
    found = check()
    assert (found.is_sound, found.shards_checked) == (True, 6)
    assert found.notes[0].startswith(
        "pages/00000.bin names 2 more shards than the manifest: the manifest is an old one"
    )


def test_an_old_manifest_whose_shards_were_made_anew_is_named(
    check: Callable[[], Verification], folder: Path, tmp_path: Path
) -> None:
    write_genesis(tmp_path / "anew", shards=6, tokens=401)
    for name in ("shard_1.bin", "pages/00000.bin"):
        shutil.copy(tmp_path / "anew" / name, folder / name)
    assert check().problems == ("pages/00000.bin does not match its digest in the signed manifest.",)


def test_a_new_manifest_with_old_shards_is_named(check: Callable[[], Verification], folder: Path) -> None:
    page = (folder / "pages/00000.bin").read_bytes()
    write(folder, 8)
    (folder / "shard_7.bin").unlink()
    assert check().problems == ("shard_7.bin is missing.",)
    (folder / "pages/00000.bin").write_bytes(page)
    assert "it is cut off, or older than the manifest" in check().problems[0]


def test_tables_are_checked(check: Callable[[], Verification], folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(OTHER_TABLE.to_json())
    archived = next((folder / "tokenizers").iterdir())
    archived.unlink()
    assert check().problems == (
        f"tokenizers/{archived.name} is missing.",
        "tokenizer.json does not match its digest in the manifest.",
    )


def test_a_table_that_does_not_continue_its_predecessor_is_named(tmp_path: Path) -> None:
    write(tmp_path, 2, FULL_TABLE)
    write(tmp_path, 4, NEW_TABLE)
    told = verify_data_set(FolderDestination(tmp_path), trust=ManifestTrust()).problems
    assert told[0] == "The table of shard 2 and later does not continue the one before it."


def test_ids_are_compared_with_the_table_of_their_own_shard(tmp_path: Path) -> None:
    """The samples' ids go up to 999: beyond the first table, within the second one."""
    write(tmp_path, 2, OLD_TABLE)
    write(tmp_path, 4, NEW_TABLE)
    told = verify_data_set(FolderDestination(tmp_path), trust=ManifestTrust()).problems
    assert told == ("shard_0.bin has token ids outside 0..329.", "shard_1.bin has token ids outside 0..329.")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("total_tokens", 7, "The manifest says 7 tokens, its 6 shards have 2400."),
        ("total_size_bytes", 7, "the manifest says 7."),
        ("sources", {"a": {"shards": 5, "tokens": 2000}}, "The sources of the manifest gave 5 shards, there are 6."),
        ("sources", {"a": {"shards": 6, "tokens": 2401}}, "The counts of source a contradict each other."),
    ],
)
def test_counts_are_checked(folder: Path, name: str, value: object, told: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    unsigned = {key: item for key, item in manifest.items() if key != "signature"} | {name: value}
    (folder / "manifest.json").write_text(json.dumps(unsigned))
    problems = verify_data_set(FolderDestination(folder), trust=ManifestTrust()).problems
    assert len(problems) == 1
    assert told in problems[0]


def test_a_sample_checks_as_many_as_asked_and_finds_what_it_meets(folder: Path) -> None:
    (folder / "shard_4.bin").unlink()
    found = [
        verify_data_set(FolderDestination(folder), trust=ManifestTrust(), sample=VerificationSample(2, Random(s)))
        for s in range(40)
    ]
    assert {verification.shards_checked for verification in found} == {2}
    assert {verification.problems for verification in found} == {(), ("shard_4.bin is missing.",)}
    whole = verify_data_set(FolderDestination(folder), trust=ManifestTrust(), sample=VerificationSample(100, Random(1)))
    assert whole.shards_checked == 6


def test_a_place_that_goes_away_is_told(folder: Path) -> None:
    with GenesisServer(folder) as server:
        place: ReadOnlyPlace = open_place(server.url)
    quick = HttpReader(place.description, policy=RetryPolicy(first_seconds=0.001, longest_seconds=0.001))
    with pytest.raises(DataUnavailableError, match="cannot be reached"):
        verify_data_set(quick, trust=ManifestTrust())
    for reader in (place, quick):
        reader.close()


def test_a_huge_file_is_refused_before_it_is_read(folder: Path) -> None:
    with (folder / "pages/00000.bin").open("r+b") as file:
        file.truncate(MAX_PAGE_BYTES + 1)
    with GenesisServer(folder) as server:
        place = open_place(server.url)
        with pytest.raises(DataError, match="131073 bytes"):
            place.read("pages/00000.bin", MAX_PAGE_BYTES)
        place.close()


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`neuroshard genesis ...`: its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["neuroshard", "genesis", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    return run


def test_the_command_tells_and_has_its_exit_code(folder: Path, command: Command) -> None:
    code, told = command("verify", str(folder), "--key", TestSigner().public_key.hex())
    assert code == 0
    assert "6 of 6 shards checked; the manifest is signed by" in told
    (folder / "shard_3.bin").unlink()
    code, told = command("verify", str(folder), "--json")
    facts = json.loads(told)
    assert code == 6
    assert (facts["sound"], facts["checked"], facts["problems"]) == (False, 6, ["shard_3.bin is missing."])
    assert command("verify", str(folder), "--key", "ab" * 32)[0] == 6
    assert command("verify", str(folder / "nothing"))[0] == 6
    assert command("verify", "ftp://example.org/data")[0] == 2
    with GenesisServer(folder) as server:
        code, told = command("verify", server.url, "--sample", "6")
    assert code == 6
    assert "- shard_3.bin is missing." in told
