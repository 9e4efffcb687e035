"""What real sources bring: huge documents, sources that fail or grow, new sources beside old ones."""

from __future__ import annotations

import io
import json
from pathlib import Path
from threading import Event, Thread

import numpy as np
import psutil
import pytest

from neuroshard.data.manifest import parse_manifest
from neuroshard.data.tokenizer import BOS, EOS, Tokenizer, TokenizerTable
from neuroshard.dataset import verify_folder
from neuroshard.dataset.progress import ProgressPrinter, SourceProgress, duration_in_words
from neuroshard.errors import DataError, StoppedError
from tests.worlds.data_sets import (
    SHARD_TOKENS,
    configured,
    contents,
    json_source,
    made_up_texts,
    run_population,
    write_json_lines,
)


@pytest.mark.long
def test_a_document_of_a_hundred_megabytes_among_small_ones(tmp_path: Path) -> None:
    """It goes through in pieces: what it takes is its own size a few times, not that of all its tokens."""
    huge = "a few words that repeat, " * 4_200_000
    assert len(huge) > 100 << 20
    path = write_json_lines(tmp_path / "a.jsonl", ["before", huge, "after", *made_up_texts(20)])
    size = 1_000_000
    before = psutil.Process().memory_info().rss
    report = run_population(configured(json_source(path, target=16), shard_tokens=size), tmp_path / "g", workers=2)
    grown = psutil.Process().memory_info().rss - before
    assert report.shards == 16
    assert verify_folder(tmp_path / "g").is_sound
    ids = np.concatenate([np.fromfile(tmp_path / f"g/shard_{i}.bin", dtype="<u2") for i in range(16)])
    assert len(ids) == 16 * size
    tokenizer = Tokenizer(TokenizerTable.load((tmp_path / "g/tokenizer.json").read_bytes()))
    start = tokenizer.encode("before", bos=True, eos=True).tolist()
    assert ids[: len(start)].tolist() == start
    assert ids[len(start)] == BOS
    assert not np.isin(ids[len(start) + 1 :], [BOS, EOS]).any()  # one document, however many pieces
    assert tokenizer.decode(ids[len(start) : len(start) + 10_000].tolist()) in huge
    assert grown < 5 * len(huge)


def test_a_source_that_stays_away_does_not_hold_up_the_others(tmp_path: Path) -> None:
    here = json_source(write_json_lines(tmp_path / "a.jsonl", made_up_texts(900)), "here", priority=2)
    away = json_source(write_json_lines(tmp_path / "b.jsonl", made_up_texts(300, seed=2)), "away")
    run_population(configured(here, away), tmp_path / "g", workers=1)
    before = contents(tmp_path / "g")
    lines = (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "b.jsonl").unlink()
    write_json_lines(tmp_path / "a.jsonl", made_up_texts(1_200))
    report = run_population(configured(here, away), tmp_path / "g")
    assert list(report.failures) == ["away"]
    assert "does not exist" in report.failures["away"]
    assert report.shards > sum(name.startswith("shard_") for name in before)
    assert verify_folder(tmp_path / "g").is_sound
    (tmp_path / "b.jsonl").write_bytes(lines + b'{"text": "more"}\n' * 4_000)
    healed = run_population(configured(here, away), tmp_path / "g")
    assert healed.failures == {}
    assert healed.shards_by_source["away"] > report.shards_by_source["away"]


def test_a_source_whose_read_files_changed_does_not_hold_up_the_others(tmp_path: Path) -> None:
    edited = json_source(write_json_lines(tmp_path / "edited/a.jsonl", made_up_texts(600)).parent, "edited", priority=2)
    here = json_source(write_json_lines(tmp_path / "here.jsonl", made_up_texts(300, seed=2)), "here")
    first = write_json_lines(tmp_path / "edited/b.jsonl", made_up_texts(100, seed=3)).with_name("a.jsonl")
    before = run_population(configured(edited, here), tmp_path / "g")
    first.write_bytes(first.read_bytes()[:-1])
    write_json_lines(tmp_path / "here.jsonl", made_up_texts(900, seed=2))
    report = run_population(configured(edited, here), tmp_path / "g", pauses=(1e9,))  # trying again would not help
    assert list(report.failures) == ["edited"]
    assert "the newest of them is a.jsonl" in report.failures["edited"]
    assert report.shards_by_source["here"] > before.shards_by_source["here"]
    assert verify_folder(tmp_path / "g").is_sound
    first.unlink()
    write_json_lines(tmp_path / "edited/c.jsonl", made_up_texts(400, seed=4))
    healed = run_population(configured(edited, here), tmp_path / "g")
    assert healed.failures == {}
    assert healed.shards_by_source["edited"] > before.shards_by_source["edited"]


def test_the_size_of_shards_is_not_settled_while_a_source_is_away(tmp_path: Path) -> None:
    """Its text may be what is missing: a size too small would stay for ever."""
    here = json_source(write_json_lines(tmp_path / "a.jsonl", made_up_texts(100)), "here")
    gone = json_source(tmp_path / "b.jsonl", "gone")
    with pytest.raises(DataError, match="does not exist"):
        run_population(configured(here, gone), tmp_path / "g")
    assert not list((tmp_path / "g").glob("shard_*"))


def test_a_new_source_teaches_its_share_and_the_manifest_says_from_where_on(tmp_path: Path) -> None:
    first = json_source(write_json_lines(tmp_path / "a.jsonl", made_up_texts(600)), "a", target=20)
    run_population(configured(first, merges=20), tmp_path / "g")
    old = (tmp_path / "g/tokenizer.json").read_bytes()
    second = json_source(write_json_lines(tmp_path / "b.jsonl", made_up_texts(600, seed=5)), "b", priority=2)
    run_population(configured(first, second, merges=70), tmp_path / "g")
    manifest = parse_manifest((tmp_path / "g/manifest.json").read_bytes())
    assert [entry.first_shard for entry in manifest.tokenizers] == [0, 20]
    assert manifest.tokenizer_version == "2"
    new = TokenizerTable.load((tmp_path / "g/tokenizer.json").read_bytes())
    assert new.sources_contributed == {"a": 20, "b": 50}
    assert new.merges[:20] == TokenizerTable.load(old).merges
    assert json.loads((tmp_path / "g/tokenizer.json").read_bytes())["current_vocab_size"] == 266 + 70
    assert (tmp_path / f"g/tokenizers/{manifest.tokenizers[0].sha256}.json").read_bytes() == old
    assert verify_folder(tmp_path / "g").is_sound
    before = contents(tmp_path / "g")
    run_population(configured(first, second, merges=70), tmp_path / "g")
    assert contents(tmp_path / "g") == before  # asked again, nothing is learned again


def test_a_followed_source_is_read_on_as_it_grows(tmp_path: Path) -> None:
    texts = made_up_texts(1_200)
    path = write_json_lines(tmp_path / "a.jsonl", texts[:500])
    stop, checkpoints = Event(), tmp_path / "g/checkpoints.json"
    counts: list[int] = []

    def grow() -> None:
        """Two more parts, each once the one before is in shards; then the request to stop."""
        for end in (900, 1_200, None):
            seen = counts[-1] if counts else 0
            while not stop.wait(0.02):
                total = json.loads(checkpoints.read_bytes())["total_shards"] if checkpoints.exists() else 0
                if total > seen + 8:
                    counts.append(total)
                    break
            if end is None:
                stop.set()
            else:
                write_json_lines(path, texts[:end])

    grower = Thread(target=grow)
    grower.start()
    report = run_population(configured(json_source(path)), tmp_path / "g", stop=stop, follow_seconds=0.05)
    grower.join()
    assert report.is_stopped
    run_population(configured(json_source(path)), tmp_path / "g")
    run_population(configured(json_source(path)), tmp_path / "once")
    followed, once = contents(tmp_path / "g"), contents(tmp_path / "once")
    assert {name: digest for name, digest in followed.items() if name.startswith("shard_")} == {
        name: digest for name, digest in once.items() if name.startswith("shard_")
    }


def test_a_stop_while_the_vocabulary_is_learned_leaves_nothing(tmp_path: Path) -> None:
    stop = Event()
    stop.set()
    source = json_source(write_json_lines(tmp_path / "a.jsonl", made_up_texts(500)))
    with pytest.raises(StoppedError, match="Run the same command again to continue"):
        run_population(configured(source), tmp_path / "g", stop=stop)
    assert contents(tmp_path / "g") == {}


class Screen(io.StringIO):
    """A stream that may be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


STATUS = SourceProgress("web", 3, 103, SHARD_TOKENS, SHARD_TOKENS * 2, 8_000_000, 1_234, 4.0)


def test_progress_on_a_terminal_and_elsewhere() -> None:
    assert STATUS.line() == "web: 3 of 103 shards, 1,234 documents, 2.0 MB/s, at most 3 min left"
    for is_terminal, times, expected in ((True, (0.0, 0.1, 0.5), 2), (False, (0.0, 10.0, 31.0), 2)):
        clock = iter(times)
        screen = Screen(is_terminal=is_terminal)
        printer = ProgressPrinter(screen, clock.__next__)
        for _ in times:
            printer.tokenising(STATUS)
        assert screen.getvalue().count(STATUS.line()) == expected
        assert screen.getvalue().startswith("\r") == is_terminal
        printer.say("something else")
        assert screen.getvalue().endswith("something else\n")


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 s"), (59, "59 s"), (61, "1 min"), (5_400, "1.5 h"), (200_000, "2.3 d")]
)
def test_durations_are_spelled_in_their_largest_unit(seconds: float, said: str) -> None:
    assert duration_in_words(seconds) == said
