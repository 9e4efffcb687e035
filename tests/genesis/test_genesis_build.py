from __future__ import annotations

import errno
import json
import os
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from neuroshard.config.state_file import TEMPORARY_PREFIX
from neuroshard.data.entropy import unigram_entropy
from neuroshard.data.manifest import CHECKPOINTS_NAME, MANIFEST_NAME, ManifestTrust, parse_manifest
from neuroshard.data.tokenizer import BOS, EOS, Tokenizer, TokenizerTable
from neuroshard.dataset import BuildOptions, Document, FolderText, build_genesis, read_report, verify_folder
from neuroshard.dataset.build_folder import UNFINISHED_SUFFIX
from neuroshard.dataset.build_text import Fraction, in_sections
from neuroshard.dataset.folder_destination import FolderDestination
from neuroshard.dataset.object_store import Condition, ExpectedVersion, Version
from neuroshard.dataset.packing import section_characters
from neuroshard.dataset.writer import GenesisWriter
from neuroshard.errors import DataError, DiskFullError, StorageError, UsageError
from neuroshard.runs.default_run import RUN_FILE
from tests.worlds.data_sets import TestSigner

NOW = "2025-01-01T00:00:00Z"
SMALL = BuildOptions(vocabulary=400)


@dataclass(frozen=True)
class ListedText:
    """Documents given in the test; counts how often they were read."""

    listed: tuple[Document, ...]
    reads: list[int]
    name: str = "listed"

    def fingerprint(self) -> str:
        return repr(self.listed)

    def documents(self, progress: Fraction) -> list[Document]:
        self.reads.append(1)
        progress(1.0)
        return list(self.listed)


def some_text(documents: int = 30) -> ListedText:
    chance = random.Random(7)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 7))) for _ in range(300)]

    def line() -> str:
        return " ".join(chance.choices(words, k=9)) + "\n"

    return ListedText(
        tuple(Document(f"doc {i}", "".join(line() for _ in range(40))) for i in range(documents)), reads=[]
    )


SIGNER = TestSigner()


def test_shards_are_tensors_for_torch_when_that_is_asked_for(tmp_path: Path) -> None:
    source, options = some_text(), replace(SMALL, shard_format="pt")
    folder = build_genesis(source, tmp_path / "pt", SIGNER, now=NOW, options=options).folder
    plain = build_genesis(source, tmp_path / "bin", SIGNER, now=NOW, options=SMALL).folder
    assert verify_folder(folder).is_sound
    for number, ids in enumerate(shard_ids(plain)):
        tensor = torch.load(folder / f"shard_{number}.pt", weights_only=True)
        assert tensor.dtype == torch.int64
        assert tensor.tolist() == ids.tolist()
    assert not list(folder.glob("*.bin"))


def shard_ids(folder: Path) -> list[np.ndarray]:
    report = read_report(folder)
    assert report is not None
    return [np.fromfile(folder / f"shard_{i}.bin", dtype="<u2") for i in range(report.shards)]


def test_a_built_folder_is_signed_sound_and_holds_the_text(tmp_path: Path) -> None:
    source, told = some_text(), list[tuple[str, float]]()
    built = build_genesis(source, tmp_path / "g", SIGNER, now=NOW, options=SMALL, progress=lambda *at: told.append(at))
    manifest = parse_manifest((built.folder / "manifest.json").read_bytes(), ManifestTrust(SIGNER.public_key.hex()))
    assert manifest.total_shards == built.report.shards >= 16
    sections = list(
        in_sections(source.listed, section_characters(sum(len(document.text) for document in source.listed)))
    )
    assert manifest.sources["listed"].documents_processed == len(sections) > 30
    assert built.report.documents == 30
    table = TokenizerTable.load((built.folder / "tokenizer.json").read_bytes())
    assert table.next_merge_id == manifest.tokenizers[-1].next_merge_id == built.report.vocabulary <= 400

    ids = np.concatenate(shard_ids(built.folder))
    pieces = "".join(Tokenizer(table).decode(ids.tolist()))
    found = [document for document in source.listed if document.text[:60] in pieces]
    assert len(found) == 30
    inner = ids[np.flatnonzero(ids == EOS)[:-1] + 1]
    assert ids[0] == BOS
    assert len(sections) - 1 <= np.count_nonzero(ids == BOS) <= len(sections)  # fewer than 16 tokens are left over
    assert (inner == BOS).all()  # every document begins with BOS right after the last one's EOS
    assert built.report.unigram_entropy == pytest.approx(unigram_entropy(np.bincount(ids)))

    verification = verify_folder(built.folder)
    assert verification.is_sound
    assert verification.signed_by == SIGNER.public_key.hex()
    assert verification.shards_checked == built.report.shards
    assert list(dict.fromkeys(stage for stage, _ in told)) == [
        "Reading the text",
        "Learning the tokenizer",
        "Encoding the text",
    ]
    assert all(0 <= fraction <= 1 for _, fraction in told)


def test_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build_genesis(some_text(), tmp_path / name, SIGNER, now=NOW, options=SMALL)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert files
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_finished_folder_is_reused_and_anything_new_rebuilds_it(tmp_path: Path) -> None:
    source, folder = some_text(), tmp_path / "g"
    first = build_genesis(source, folder, SIGNER, now=NOW, options=SMALL)
    again = build_genesis(source, folder, SIGNER, now=NOW, options=SMALL)
    assert (first.is_reused, again.is_reused, len(source.reads)) == (False, True, 1)
    assert again.report == first.report
    assert not build_genesis(source, folder, TestSigner(2), now=NOW, options=SMALL).is_reused
    assert not build_genesis(some_text(31), folder, TestSigner(2), now=NOW, options=SMALL).is_reused
    assert not build_genesis(
        some_text(31), folder, TestSigner(2), now=NOW, options=replace(SMALL, vocabulary=300)
    ).is_reused
    assert verify_folder(folder).is_sound
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g"]


@pytest.mark.parametrize("name", ["shard_5.bin", "manifest.json", "tokenizer.json"])
def test_a_damaged_folder_is_built_again(tmp_path: Path, name: str) -> None:
    folder = build_genesis(some_text(), tmp_path / "g", SIGNER, now=NOW, options=SMALL).folder
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    assert not build_genesis(some_text(), folder, SIGNER, now=NOW, options=SMALL).is_reused
    assert verify_folder(folder).is_sound


def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError):
        build_genesis(some_text(), tmp_path / "g", SIGNER, now=NOW, options=SMALL)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_build_is_redone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "g"

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(GenesisWriter, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build_genesis(some_text(), folder, SIGNER, now=NOW, options=SMALL)
    assert not folder.exists()
    (tmp_path / "g.unfinished").mkdir()
    (tmp_path / "g.unfinished" / "shard_99.bin").write_bytes(b"left over by a kill")
    built = build_genesis(some_text(), folder, SIGNER, now=NOW, options=SMALL)
    assert not (built.folder / "shard_99.bin").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g"]


def test_a_build_killed_after_any_write_is_redone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write of the populator is followed by a copy of the folder, as a kill at that moment would leave it."""
    left: list[Path] = []
    write = FolderDestination.write

    def write_and_copy(
        self: FolderDestination, name: str, data: bytes, *, expected: ExpectedVersion = Condition.ANY
    ) -> Version:
        version = write(self, name, data, expected=expected)
        left.append(shutil.copytree(tmp_path / "g.unfinished", tmp_path / "left" / str(len(left))))
        return version

    with monkeypatch.context() as patched:
        patched.setattr(FolderDestination, "write", write_and_copy)
        build_genesis(some_text(), tmp_path / "g", SIGNER, now=NOW, options=SMALL)
    assert {path.name for folder in left for path in folder.iterdir()} >= {CHECKPOINTS_NAME, MANIFEST_NAME}
    for number, folder in enumerate(left):
        shutil.copytree(folder, tmp_path / str(number) / "g.unfinished")
        built = build_genesis(some_text(), tmp_path / str(number) / "g", SIGNER, now=NOW, options=SMALL)
        assert verify_folder(built.folder).is_sound


def test_a_failed_rebuild_keeps_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    build_genesis(some_text(), folder, SIGNER, now=NOW, options=SMALL)
    with pytest.raises(DataError, match="Add more text"):
        build_genesis(some_text(1), folder, SIGNER, now=NOW, options=SMALL)
    assert verify_folder(folder).is_sound


def test_a_folder_with_other_things_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_text("x")
    for name in ("photos", "file"):
        with pytest.raises(StorageError, match="not built here"):
            build_genesis(some_text(), tmp_path / name, SIGNER, now=NOW, options=SMALL)
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"cat"


@pytest.mark.parametrize(
    "place", ["g/notes.txt", "g/pages/notes.txt", "g.outdated/notes.txt", "g.unfinished/notes.txt"]
)
def test_files_of_the_user_are_never_removed_with_an_older_build(tmp_path: Path, place: str) -> None:
    build_genesis(some_text(), tmp_path / "g", SIGNER, now=NOW, options=SMALL)
    mine = tmp_path / place
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(StorageError, match="not built here"):
        build_genesis(some_text(31), tmp_path / "g", SIGNER, now=NOW, options=SMALL)
    assert mine.read_text() == "mine"
    assert verify_folder(tmp_path / "g").is_sound


def test_the_default_run_of_the_data_outlives_a_rebuild(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    first = build_genesis(some_text(), folder, SIGNER, now=NOW, options=SMALL)
    assert not first.has_default_run
    (folder / RUN_FILE).write_bytes(b"as `run publish` left it")
    (folder / f"{TEMPORARY_PREFIX}{RUN_FILE}-0123").write_bytes(b"of a publication that was killed")
    rebuilt = build_genesis(some_text(31), folder, SIGNER, now=NOW, options=SMALL)
    assert (rebuilt.is_reused, rebuilt.has_default_run) == (False, True)
    assert (folder / RUN_FILE).read_bytes() == b"as `run publish` left it"
    assert (folder / RUN_FILE).stat().st_mode & 0o444 == 0o444
    assert verify_folder(folder).is_sound
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g"]
    assert build_genesis(some_text(31), folder, SIGNER, now=NOW, options=SMALL).has_default_run


def test_no_reader_sees_the_data_without_their_default_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the two renames of the swap, the next build finds it where it was put aside."""
    folder = tmp_path / "g"
    build_genesis(some_text(), folder, SIGNER, now=NOW, options=SMALL)
    (folder / RUN_FILE).write_bytes(b"published")
    rename = Path.rename
    moved: list[tuple[str, bool]] = []

    def killed(path: Path, target: Path) -> Path:
        moved.append((path.name, (path / RUN_FILE).is_file()))
        if path.name.endswith(UNFINISHED_SUFFIX):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            build_genesis(some_text(31), folder, SIGNER, now=NOW, options=SMALL)
    assert moved == [("g", True), (f"g{UNFINISHED_SUFFIX}", True)]
    assert not folder.exists()
    build_genesis(some_text(31), folder, SIGNER, now=NOW, options=SMALL)
    assert (folder / RUN_FILE).read_bytes() == b"published"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g"]


def test_what_is_only_called_like_a_default_run_is_the_users(tmp_path: Path) -> None:
    build_genesis(some_text(), tmp_path / "g", SIGNER, now=NOW, options=SMALL)
    (tmp_path / "g" / RUN_FILE).mkdir()
    with pytest.raises(StorageError, match=r"run\.json was not built here"):
        build_genesis(some_text(31), tmp_path / "g", SIGNER, now=NOW, options=SMALL)


def test_shards_of_another_maker_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "shard_0.bin").write_bytes(b"downloaded")
    with pytest.raises(StorageError, match="not built here"):
        build_genesis(some_text(), tmp_path, SIGNER, now=NOW, options=SMALL)
    assert (tmp_path / "shard_0.bin").read_bytes() == b"downloaded"


@pytest.mark.parametrize("vocabulary", [0, 265, 32_001])
def test_a_vocabulary_out_of_range_is_refused(vocabulary: int) -> None:
    with pytest.raises(UsageError, match="32000"):
        BuildOptions(vocabulary=vocabulary)


def test_near_duplicates_do_not_reach_any_shard(tmp_path: Path) -> None:
    source = some_text()
    copies = tuple(
        Document(f"copy of {document.name}", document.text + "and one more line\n") for document in source.listed
    )
    doubled = ListedText(source.listed + copies, reads=[])
    report = build_genesis(doubled, tmp_path / "g", SIGNER, now=NOW, options=SMALL).report
    assert (report.documents, report.near_duplicates) == (60, 30)


def test_every_shard_represents_the_text(tmp_path: Path) -> None:
    chance = random.Random(3)
    for name, letters in (("a.txt", "abcd"), ("b.txt", "wxyz")):
        words = ["".join(chance.choices(letters, k=4)) for _ in range(30_000)]
        (tmp_path / name).write_text("\n".join(" ".join(words[i : i + 10]) for i in range(0, len(words), 10)))
    built = build_genesis(FolderText(tmp_path), tmp_path / "g", SIGNER, now=NOW, options=BuildOptions(vocabulary=266))
    shares = [float(np.isin(ids, [10 + ord(letter) for letter in "abcd"]).mean()) for ids in shard_ids(built.folder)]
    assert min(shares) > 0.1
    assert max(shares) < 0.7


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("shard_3.bin", "shard_3.bin does not match"),
        ("pages/00000.bin", "does not match its digest in the signed manifest"),
        ("tokenizer.json", "tokenizer.json does not match"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, name: str, problem: str) -> None:
    folder = build_genesis(some_text(), tmp_path / "g", SIGNER, now=NOW, options=SMALL).folder
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    verification = verify_folder(folder)
    assert not verification.is_sound
    assert any(problem in told for told in verification.problems)


def test_missing_files_and_a_forged_manifest_are_found(tmp_path: Path) -> None:
    folder = build_genesis(some_text(), tmp_path / "g", SIGNER, now=NOW, options=SMALL).folder
    (folder / "shard_0.bin").unlink()
    assert verify_folder(folder).problems == ("shard_0.bin is missing.",)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["total_tokens"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError):
        verify_folder(folder)
    with pytest.raises(DataError):
        verify_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"fingerprint": 1}', "{" * 10**5, "\xff"])
def test_a_report_that_cannot_be_read_means_no_reuse(tmp_path: Path, content: str) -> None:
    (tmp_path / "build.json").write_text(content)
    assert read_report(tmp_path) is None
