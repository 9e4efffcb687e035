"""What must not be read by strangers is taken out, and what helps them stays."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis.strategies import lists, sampled_from

from neuroshard.identity.wallet import phrase_word_list
from neuroshard.telemetry.redaction import Redactor, Scrubber

WORDS = phrase_word_list()
PHRASE = "legal winner thank year wave sausage worth useful legal winner thank yellow"
SCRUBBER = Scrubber((Redactor("hunter2-token"),), WORDS, Path("/home/ada"), "adas-desktop")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("the token hunter2-token here", "the token [secret] here"),
        (f"phrase: {PHRASE}.", "phrase: [secret]."),
        (f"Please store {PHRASE.replace(' ', ', ')} well", "Please store [secret] well"),
        (f"In capitals: {PHRASE.upper()}", "In capitals: [secret]"),
        ("https://ada:pw@data.example/x", "https://[secret]@data.example/x"),
        ('password = "open sesame", next', "password = [secret], next"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [secret]"),
        ("/home/ada/.local/share/neuroshard", "~/.local/share/neuroshard"),
        ("/home/bob/texts and /Users/Bob/x", "/home/[user]/texts and /Users/[user]/x"),
        (r"C:\Users\Bob\AppData", r"C:\Users\[user]\AppData"),
        ("/home/adam/x", "/home/[user]/x"),
        ("on adas-desktop now", "on [host] now"),
        ("/ip4/93.184.216.34/tcp/4001", "/ip4/[address]/tcp/4001"),
        ("/ip6/2606:2800:220:1:248:1893:25c8:1946/tcp/1", "/ip6/[address]/tcp/1"),
    ],
)
def test_private_things_go(text: str, clean: str) -> None:
    assert SCRUBBER.text(text) == clean


def test_a_name_of_several_words_goes_in_every_form_of_the_home_folder() -> None:
    scrubber = Scrubber((), WORDS, PureWindowsPath(r"C:\Users\Ada Lovelace"), "host")
    told = r"'C:\\Users\\Ada Lovelace\\x' and C:\Users\Ada Lovelace\y"
    assert scrubber.text(told) == r"'~\\x' and ~\y"


@pytest.mark.parametrize(
    "text",
    [
        "listening at /ip4/127.0.0.1/tcp/8000, 192.168.1.7 and ::1",
        "version 1.2.3.4567 at 14:03:22, 3.11.2, run " + "ab" * 32,
        "The node is still starting: try again when it trains; the dashboard shows progress every few seconds.",
        " ".join(PHRASE.split()[:11]),
    ],
)
def test_what_helps_stays(text: str) -> None:
    assert SCRUBBER.text(text) == text


@given(lists(sampled_from(WORDS), min_size=12, max_size=24))
def test_no_phrase_of_any_words_stays(words: list[str]) -> None:
    text = SCRUBBER.text(f"before {' '.join(words)} 42")
    assert not any(f" {a} {b} " in f" {text} " for a, b in pairwise(words))


def test_every_text_of_a_value_is_cleaned() -> None:
    value = {"a": ["hunter2-token", 1, None, {"hunter2-token": True}], "b": 0.5}
    assert SCRUBBER.json(value) == {"a": ["[secret]", 1, None, {"[secret]": True}], "b": 0.5}


def test_long_texts_take_little_time() -> None:
    text = "legal winner thank " * 20_000 + "a:" * 50_000 + "1." * 50_000
    assert "legal" not in SCRUBBER.text(text)
