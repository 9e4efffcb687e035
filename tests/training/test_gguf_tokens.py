"""Token ids of exported models in llama.cpp and in `tokenizers`: equal to ours for every text.

Verified here: the pattern of new data sets against the llama.cpp of `xllamacpp`, character by character for all of
Unicode, and for random and hostile texts. Not verified: other versions of llama.cpp, which may know more letters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from pydoc_data import topics

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_export_elsewhere import GROUPED, llama_cpp, made_model, save_in_stages

from neuroshard.data.tokenizer import (
    FIRST_BYTE_ID,
    LLAMA_PATTERN,
    Tokenizer,
    TokenizerTable,
    byte_table,
    learn_merges,
    replace_surrogates,
)
from neuroshard.data.tokenizer.byte_level import huggingface_tokenizer
from neuroshard.state.export import export_gguf

needs_llama_cpp = pytest.mark.skipif(
    find_spec("gguf") is None or find_spec("xllamacpp") is None, reason="gguf or xllamacpp is not installed"
)
needs_tokenizers = pytest.mark.skipif(find_spec("tokenizers") is None, reason="tokenizers is not installed")
SMALL = replace(GROUPED, hidden_size=32, layer_count=1, head_count=2, key_value_head_count=1, feed_forward_size=32)
TEXTS = [topics.topics[name] for name in sorted(topics.topics)[:20]]
STRANGE = (
    "caf\u00e9 \u4f60\u597d \u0928\u092e\u0938\u094d\u0924\u0947 \U0001f600\u200d\U0001f525 \u0661\u0662\u0663\u0664 "
    "I'LL don\u2019t\r\n\r\n \t\n  x\u00a0\u3000y "
)
TABLE = learn_merges([*TEXTS, STRANGE * 3], 400, byte_table(LLAMA_PATTERN))
OURS = Tokenizer(TABLE)
NEAR = [
    "'",
    "S",
    "'ll",
    "'VE",
    "\r",
    "\n",
    " ",
    "\t",
    "\u00a0",
    "\u3000",
    "\u0085",
    "\u200b",
    "\x1c",
    "1",
    "\u00b2",
    "a",
    "\u0301",
]
NEAR += [
    "\U00020000",
    "\U0001d7d8",
    "\U0010ffff",
    "\ufffd",
    "<|end_of_text|>",
    "<|pad|>",
    "Python",
    "\ufeff",
    "\x00",
    ".",
]
# Texts of characters next to the limits of the pattern, and of any characters at all.
any_text = st.lists(st.one_of(st.sampled_from(NEAR), st.text(max_size=8))).map("".join).map(replace_surrogates)
HOSTILE = [
    " " * 5_000 + "x",
    "\n" * 5_000,
    " \n" * 3_000,
    "ab" * 5_000,
    "." * 5_000 + "\r\n" * 50,
    "1" * 5_000,
    "'" * 999 + "s",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """llama.cpp with an exported model whose vocabulary was learned."""
    yield from served(TABLE, tmp_path_factory.mktemp("learned"))


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """llama.cpp with a vocabulary that joins a letter, a digit or a mark with the first byte of what follows it."""
    yield from served(PROBES, tmp_path_factory.mktemp("probes"))


def served(table: TokenizerTable, folder: Path) -> Iterator[httpx.Client]:
    import xllamacpp

    model = made_model(replace(SMALL, vocabulary_size=table.next_merge_id))
    export_gguf(save_in_stages(model, folder, 1), folder / "model.gguf", table)
    with llama_cpp(xllamacpp, folder / "model.gguf") as client:
        yield client


def ids_there(client: httpx.Client, text: str) -> list[int]:
    question = {"content": text, "add_special": False, "parse_special": False}
    tokens: list[int] = client.post("/tokenize", json=question).raise_for_status().json()["tokens"]
    return tokens


JOINING = [(FIRST_BYTE_ID + ord(before), FIRST_BYTE_ID + lead) for before in "a1!" for lead in range(0xC2, 0xF5)]
PROBES = TokenizerTable(tuple(JOINING), 266 + len(JOINING), LLAMA_PATTERN)
POINTS = [point for point in range(0x80, 0x110000) if not 0xD800 <= point < 0xE000]


@needs_llama_cpp
@pytest.mark.timeout(600)
def test_every_character_of_unicode_is_split_as_llama_cpp_does(probe: httpx.Client) -> None:
    """The merges happen only inside a piece, so the ids show whether a character continues a word, number or sign."""
    encode = Tokenizer(PROBES).encode
    for start in range(0, len(POINTS), 40_000):
        for before in "a1!":
            text = "".join(f"{before}{chr(point)}\n" for point in POINTS[start : start + 40_000])
            assert ids_there(probe, text) == encode(text).tolist(), (before, hex(POINTS[start]))


@needs_llama_cpp
@given(any_text)
@example(STRANGE)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_has_our_ids_in_llama_cpp(server: httpx.Client, text: str) -> None:
    assert ids_there(server, text) == OURS.encode(text).tolist()


@needs_llama_cpp
@pytest.mark.parametrize("text", [*HOSTILE, *TEXTS[:3]], ids=lambda text: repr(text[:12]))
def test_hostile_and_common_texts_have_our_ids_in_llama_cpp(server: httpx.Client, text: str) -> None:
    assert ids_there(server, text) == OURS.encode(text).tolist()


@needs_tokenizers
@given(any_text)
@example(STRANGE)
@example(HOSTILE[0])
@settings(max_examples=300, deadline=None)
def test_any_text_has_our_ids_in_hugging_face_tokenizers(text: str) -> None:
    assert THEIRS is not None
    assert THEIRS.encode(text, add_special_tokens=False).ids == OURS.encode(text).tolist()


def hugging_face() -> object:
    if find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer as Theirs

    theirs = Theirs.from_str(json.dumps(huggingface_tokenizer(TABLE)))
    theirs.encode_special_tokens = True
    return theirs


THEIRS = hugging_face()
