from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.dataset import sources as json_lines
from neuroshard.dataset.file_source import files_from
from neuroshard.dataset.records import ListedTexts
from neuroshard.dataset.sources import (
    Position,
    SourceChangedError,
    SourceConfiguration,
    SourceFailureError,
    open_document_source,
)
from neuroshard.errors import DataError, UsageError
from neuroshard.types import JsonValue
from tests.worlds.data_sets import configured, run_population, write_json_lines

TEXTS = [f"document {i} \u00e9\u4f60\U0001f600" for i in range(700)]


def test_listed_texts_are_read_from_any_position() -> None:
    source = ListedTexts(TEXTS[:5])
    reader = source.open({})
    for count, record in enumerate(reader.records(), start=1):
        assert record.text == TEXTS[count - 1]
        assert [later.text for later in source.open(reader.position()).records()] == TEXTS[count:5]
    assert [record.text for record in source.open({}).records()] == TEXTS[:5]


def configuration(kind: str, location: Path, **more: object) -> SourceConfiguration:
    content = {"name": "s", "kind": kind, "location": str(location), "target_shards": 20, **more}
    return SourceConfiguration.model_validate(content)


def read_all(source: SourceConfiguration, position: Position | None = None) -> list[str]:
    """Texts, and problems with an exclamation mark before them."""
    reader = open_document_source(source).open(position or {})
    return [f"!{record.problem}" if record.problem else record.text for record in reader.records()]


def plain(folder: Path) -> SourceConfiguration:
    write_json_lines(folder / "a/1.jsonl", TEXTS[:300])
    write_json_lines(folder / "b.jsonl", TEXTS[300:])
    return configuration("jsonl", folder)


def gzipped(folder: Path) -> SourceConfiguration:
    """Two members one after another are one file."""
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
    (folder / "x.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:500])) + gzip.compress(b"".join(lines[500:])))
    return configuration("jsonl", folder)


def zstandard_packed(folder: Path) -> SourceConfiguration:
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
    parts = [zstandard.compress(b"".join(lines[:500])), zstandard.compress(b"".join(lines[500:]))]
    (folder / "x.jsonl.zst").write_bytes(b"".join(parts))
    return configuration("jsonl", folder)


def parquet(folder: Path) -> SourceConfiguration:
    for number, texts in enumerate((TEXTS[:300], TEXTS[300:])):
        table = pa.table({"id": list(range(len(texts))), "body": texts})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=70)
    return configuration("parquet", folder, text_field="body")


def text_files(folder: Path) -> SourceConfiguration:
    for number, text in enumerate(TEXTS):
        (folder / f"{number:04d}.txt").write_text(text, encoding="utf-8")
    return configuration("text", folder)


def hugging_face(folder: Path) -> SourceConfiguration:
    """A dataset in the hub's layout on this computer: the hub itself is not asked in tests."""
    return configuration("huggingface", Path(plain(folder).location))


@pytest.mark.parametrize("make", [plain, gzipped, zstandard_packed, parquet, text_files, hugging_face])
def test_reading_goes_on_from_any_position(tmp_path: Path, make: Callable[[Path], SourceConfiguration]) -> None:
    source = make(tmp_path)
    reader = open_document_source(source).open({})
    positions: dict[int, JsonValue] = {0: dict(reader.position())}
    found: list[str] = []
    for record in reader.records():
        found.append(record.text)
        if len(found) in {1, 64, 299, 300, 301, 350, 699, 700}:
            positions[len(found)] = json.loads(json.dumps(reader.position()))  # as the checkpoint keeps it
    assert found == TEXTS
    for count, position in positions.items():
        assert isinstance(position, dict)
        assert read_all(source, position) == TEXTS[count:]


def test_a_data_set_built_in_here_is_no_source(tmp_path: Path) -> None:
    source = plain(tmp_path)
    write_json_lines(tmp_path / "out/manifest.json", ["no text of the source"])
    write_json_lines(tmp_path / "out/checkpoints.json", ["nor this"])
    assert read_all(source) == TEXTS


def test_records_without_text_are_passed_over_with_their_place(tmp_path: Path) -> None:
    lines = [b'{"text": "good"}', b"{not json", b"[1]", b"", b'{"txt": "x"}', b'{"text": 7}', b'{"text": null}']
    lines += [b"[" * 100_000, b'{"text": ' + b"9" * 5_000 + b"}", b'{"text": "\xff\xfe bad bytes"}', b'{"text": "end"}']
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join(lines))  # the last one without a line end
    found = read_all(configuration("jsonl", file))
    assert [text for text in found if not text.startswith("!")] == ["good", "\ufffd\ufffd bad bytes", "end"]
    problems = [text for text in found if text.startswith("!")]
    assert len(problems) == 7
    assert all(str(file) in problem and "byte" in problem for problem in problems)
    assert "no text under 'text'" in problems[2]


def test_a_line_over_the_limit_is_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "MAX_RECORD_BYTES", 1_000)
    file = write_json_lines(tmp_path / "a.jsonl", ["first", "x" * 5_000_000, "last"])
    source = configuration("jsonl", file)
    first, problem, last = read_all(source)
    assert (first, last) == ("first", "last")
    assert "over the limit" in problem
    reader = open_document_source(source).open({})
    records = reader.records()
    next(records)
    next(records)
    assert read_all(source, reader.position()) == ["last"]


@pytest.mark.parametrize("make", [gzipped, zstandard_packed])
def test_a_cut_archive_is_a_failure_from_which_reading_goes_on(
    tmp_path: Path, make: Callable[[Path], SourceConfiguration]
) -> None:
    source = make(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-200])
    reader, found = open_document_source(source).open({}), list[str]()
    with pytest.raises(SourceFailureError, match="not complete"):
        found.extend(record.text for record in reader.records())
    file.write_bytes(whole)
    position = reader.position()
    assert found + read_all(source, position) != []
    assert read_all(source, position)[-1] == TEXTS[-1]
    assert 700 - len(read_all(source, position)) >= 300


@pytest.mark.parametrize(
    ("name", "kind", "content"),
    [
        ("a.jsonl.gz", "jsonl", b"no gzip"),
        ("a.jsonl.zst", "jsonl", b"no zstd at all"),
        ("a.parquet", "parquet", b"PAR1"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, kind: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceFailureError, match=name):
        read_all(configuration(kind, tmp_path))


@pytest.mark.parametrize("make", [plain, parquet, hugging_face])
def test_a_wrong_field_is_told_with_those_that_are_there(
    tmp_path: Path, make: Callable[[Path], SourceConfiguration], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (json_lines, sys.modules["neuroshard.dataset.sources"]):
        monkeypatch.setattr(module, "FIRST_RECORDS", 100)
    source = make(tmp_path).model_copy(update={"text_field": "txt"})
    with pytest.raises(DataError, match=r"'txt'.*'(text|body)'.*text_field"):
        read_all(source)


def test_parquet_cells_without_text_are_passed_over(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "b.parquet")
    found = read_all(configuration("parquet", tmp_path))
    assert [text for text in found if not text.startswith("!")] == ["a", "b"]
    assert len(found) == 5


def test_text_files_in_any_encoding_and_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("caf\u00e9".encode("cp1252"))
    (tmp_path / "b.txt").write_bytes("caf\u00e9".encode("utf-16"))
    (tmp_path / "c.txt").write_bytes(b"\0\1\2")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "picture.png").write_text("no")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    assert read_all(configuration("text", tmp_path)) == ["caf\u00e9", "caf\u00e9", f"!{tmp_path}/c.txt is not text"]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_a_place_that_is_not_there_may_come_back(tmp_path: Path, kind: str) -> None:
    with pytest.raises(SourceFailureError, match="does not exist"):
        read_all(configuration(kind, tmp_path / "gone"))


@pytest.mark.parametrize(
    "position",
    [{"file": 1, "place": 0}, {"file": "a", "place": -1}, {"file": "a"}, {"file": "a", "place": 0, "files": 1}],
)
def test_a_damaged_position_is_told(tmp_path: Path, position: Position) -> None:
    with pytest.raises(DataError, match="position"):
        read_all(plain(tmp_path), position)


@pytest.mark.parametrize(("kind", "library"), [("parquet", "pyarrow.parquet"), ("huggingface", "datasets")])
def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=r"pip install 'neuroshard\[genesis\]'"):
        open_document_source(configuration(kind, tmp_path))
    with pytest.raises(UsageError, match=r"pip install 'neuroshard\[genesis\]'"):
        run_population(configured(dict(configuration(kind, tmp_path))), tmp_path / "g")
    assert not (tmp_path / "g").exists()  # nothing was begun


def test_a_half_written_last_line_waits_when_the_source_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "tw')
    source = open_document_source(configuration("jsonl", file), follows=True)
    reader = source.open({})
    assert [record.text for record in reader.records()] == ["one"]
    file.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [record.text for record in source.open(reader.position()).records()] == ["two"]


@given(st.sets(st.sampled_from(["a.txt", "a", "b.txt", "a-b.txt", "c/d.txt", "c.txt", "c/a/z.txt", "b/x.txt"])))
def test_files_come_in_one_order_from_any_of_them_on(tmp_path_factory: pytest.TempPathFactory, names: set[str]) -> None:
    root = tmp_path_factory.mktemp("tree")
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    found = list(files_from(root, (".txt",)))
    assert found == sorted(tuple(name.split("/")) for name in names if name.endswith(".txt"))
    for place, first in enumerate(found):
        assert list(files_from(root, (".txt",), first)) == found[place:]


@pytest.fixture
def half_read(tmp_path: Path) -> tuple[SourceConfiguration, Position]:
    """A source of four files, and a position in the third."""
    for number in range(4):
        write_json_lines(tmp_path / f"{number}/lines.jsonl", TEXTS[number * 10 : number * 10 + 10])
    source = configuration("jsonl", tmp_path)
    reader = open_document_source(source).open({})
    for _ in zip(range(25), reader.records(), strict=False):
        pass
    return source, reader.position()


def test_what_comes_later_is_read_and_what_was_read_may_go(
    half_read: tuple[SourceConfiguration, Position], tmp_path: Path
) -> None:
    source, position = half_read
    write_json_lines(tmp_path / "4.jsonl", TEXTS[40:50])
    (tmp_path / "0/lines.jsonl").unlink()
    assert read_all(source, position) == TEXTS[25:50]


@pytest.mark.parametrize("name", ["0/lines.jsonl", "0/added.jsonl", "2/before.jsonl", "1.jsonl"])
def test_what_would_never_be_read_is_told(
    half_read: tuple[SourceConfiguration, Position], tmp_path: Path, name: str
) -> None:
    """A file that is new or longer before the place where reading goes on."""
    source, position = half_read
    write_json_lines(tmp_path / name, TEXTS[:60])
    with pytest.raises(SourceChangedError, match=f"the newest of them is {name}"):
        read_all(source, position)
    (tmp_path / name).unlink()
    assert read_all(source, position) == TEXTS[25:40]


def test_a_position_of_an_earlier_version_takes_what_lies_before_it_as_read(
    half_read: tuple[SourceConfiguration, Position], tmp_path: Path
) -> None:
    source, position = half_read
    earlier = {name: position[name] for name in ("file", "place")}
    write_json_lines(tmp_path / "0/added.jsonl", TEXTS[:60])
    assert read_all(source, earlier) == TEXTS[25:40]
    reader = open_document_source(source).open(earlier)
    assert reader.position() == earlier
    next(reader.records())
    write_json_lines(tmp_path / "1.jsonl", TEXTS[:60])
    with pytest.raises(SourceChangedError, match=r"the newest of them is 1\.jsonl"):  # from now on it is counted
        read_all(source, reader.position())
