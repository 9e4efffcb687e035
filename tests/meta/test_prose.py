"""People read plain English and the field's words: in documents, comments, messages and names."""

from __future__ import annotations

import pytest
from prose import AVOID, REPLACED, hits_in_names, hits_in_prose, prose_files
from source_files import name_of

SAMPLES = {
    "continue, resume": ["Training goes on from step 4.", "It could have gone\non."],
    "show, report, print, return, notify": ["A wrong name is told by field.", "`doctor` tells which setting wins."],
    "is in": ["The secret lies in a file.", "The name stands in the header."],
    "again": ["The assignment starts anew."],
    "also": ["The reducer likewise signs."],
    "next to, in addition to": ["The mark is beside the files."],
    "any node that": ["It serves whoever asks."],
    "the number or the time itself": ["It takes so many bytes.", "Nobody waits so long."],
    "the number or the condition itself": ["It is sent as far as it fits."],
    "must, will": ["When shall it work?"],
    "fix, repair": ["Nothing has to be mended."],
    "not have, miss": ["The frame lacks a chunk."],
    "otherwise": ["Wait for it; else start again.", "UTF-8, else Windows-1252."],
    "per": ["30 tokens a second", "Write one setting a line.", "It sends 20 MB a day."],
    "is not a": ["`24:61` is no time."],
    "a noun as the subject": ["What a peer sends is bounded.", "It ends. Who has the first layers drives."],
    "a noun before the genitive": ["Of the next step.", "Those of the stage."],
    "a sentence that says it": ["See Exchange.", "Once."],
}
ALLOWED = [
    "It is too early to tell.",
    "A digest tells a page apart from its neighbour.",
    "A second node joins.",
    "What does it need?",
    "There is no such file.",
    "The step is no longer open.",
    "Of the 64 replicas, 48 vote.",
    "It did so long that nobody noticed.",
    "The option `--tell lies in` is old.",
]


def test_prose_avoids_the_phrases_of_the_table() -> None:
    assert [hit for path in prose_files() for hit in hits_in_prose(name_of(path), path.read_text("utf-8"))] == []


def test_names_have_the_words_of_the_field() -> None:
    files = [path for path in prose_files() if path.suffix == ".py"]
    assert [hit for path in files for hit in hits_in_names(name_of(path), path.read_text("utf-8"))] == []


def test_every_phrase_has_a_sample() -> None:
    assert set(SAMPLES) == set(AVOID.values())


@pytest.mark.parametrize("write", SAMPLES)
@pytest.mark.parametrize("kind", ["x.py", "comment.py", "docs/x.md", "x.tsx", "x.sh"])
def test_a_phrase_is_found_in_every_kind_of_file(kind: str, write: str) -> None:
    for sample in SAMPLES[write]:
        assert [hit.split(": write ")[1] for hit in hits_in_prose(kind, written(kind, sample))] == [write], sample


@pytest.mark.parametrize("word", REPLACED)
def test_a_replaced_word_is_found_in_names_of_any_form(word: str) -> None:
    code = f'"""The {word}."""\nclass {word.title()}Loop:\n    {word}_seconds = my_{word} = "{word} it"  # {word}\n'
    found = {hit.split(": ")[1] for hit in hits_in_names("x.py", code)}
    assert found == {f"name {word.title()}Loop", f"name my_{word}", f"name {word}_seconds"}


def test_a_longer_word_is_another_name() -> None:
    assert hits_in_names("x.py", "toldest = storytelling = seated = understand = 1") == []


@pytest.mark.parametrize("sentence", ALLOWED)
def test_ordinary_english_is_allowed(sentence: str) -> None:
    assert hits_in_prose("docs/x.md", sentence) == []


def written(kind: str, sentence: str) -> str:
    """A file of one sentence, below another one."""
    match kind:
        case "x.py":
            return f'def f():\n    """Say it."""\n    print(f"It is {{x}}.")\n    """{sentence}"""\n'
        case "comment.py":
            return "x = 1\n# " + sentence.replace("\n", "\n# ")
        case "x.tsx":
            return "// A card.\n/** " + sentence.replace("\n", "\n * ") + " */"
        case "x.sh":
            return "set -e\n# " + sentence.replace("\n", "\n# ")
        case _:
            return f"# Title\n\n{sentence}\n"
