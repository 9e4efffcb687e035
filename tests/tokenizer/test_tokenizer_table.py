from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.data.tokenizer import FIRST_MERGE_ID, SPLIT_PATTERN, TokenizerTable, byte_table, learn_merges
from neuroshard.errors import DataError

H, I_, E_ = 10 + ord("h"), 10 + ord("i"), 10 + ord("e")


def document(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "vocab_size": 268,
        "next_merge_id": 268,
        "pattern": SPLIT_PATTERN,
        "sources_contributed": {"a": 2},
        "merges": {f"{H}_{I_}": 266, f"266_{E_}": 267},
    }
    return {**base, **changes}


def load(value: Any) -> TokenizerTable:
    return TokenizerTable.load(json.dumps(value).encode())


def test_a_table_survives_its_file() -> None:
    table = learn_merges(["the theory of the other thing, the the"], 12, source="x")
    again = TokenizerTable.load(table.to_json())
    assert again == table
    assert again.sha256 == table.sha256
    assert list(json.loads(table.to_json())["merges"].values()) == list(range(266, 266 + len(table.merges)))


def test_merges_may_be_a_list_of_pairs() -> None:
    assert load(document(merges=[[H, I_], [266, E_]])) == load(document())


def test_merges_of_an_object_are_taken_in_order_of_their_ids() -> None:
    shuffled = {f"266_{E_}": 267, f"{H}_{I_}": 266}
    assert load(document(merges=shuffled)).merges == ((H, I_), (266, E_))


@pytest.mark.parametrize(
    "changes",
    [
        {"next_merge_id": 269, "vocab_size": 269},
        {"next_merge_id": 267},
        {"next_merge_id": 268.0},
        {"next_merge_id": True},
        {"next_merge_id": None},
        {"next_merge_id": 10**12, "vocab_size": 10**12},
        {"vocab_size": 267},
        {"vocab_size": "268"},
        {"pattern": "(a+)+$"},
        {"pattern": None},
        {"pattern": ["x"]},
        {"sources_contributed": 3},
        {"sources_contributed": {"a": -1}},
        {"sources_contributed": {"a": True}},
        {"sources_contributed": [1]},
        {"merges": None},
        {"merges": "ab"},
        {"merges": {f"{H}_{I_}": 266, f"{H}_{E_}": 266}},
        {"merges": {f"{H}_{I_}": 266, f"{H}_{E_}": 268}},
        {"merges": {f"{H}_{I_}": 266, f"{H}_{E_}": True}},
        {"merges": {f"{H}_{I_}": 266, f"{H}-{E_}": 267}},
        {"merges": {f"{H}_{I_}": 266, "\u0661\u0662_11": 267}},
        {"merges": {f"{H}_{I_}": 266, f"{H}_{I_}_{E_}": 267}},
        {"merges": [[H, I_], [H, I_]]},  # one byte string, two ids
        {"merges": [[267, I_], [H, I_]]},  # uses a later id
        {"merges": [[266, I_], [H, I_]]},  # uses itself
        {"merges": [[3, I_], [H, I_]]},  # uses a special id
        {"merges": [[H, I_], [266]]},
        {"merges": [[H, I_], [266, 1.5]]},
        {"merges": [[H, I_], "266"]},
    ],
)
def test_an_inconsistent_file_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        load(document(**changes))


def test_a_chain_of_doublings_is_refused_before_it_is_built() -> None:
    merges = [[H, H]] + [[FIRST_MERGE_ID + i, FIRST_MERGE_ID + i] for i in range(60)]
    with pytest.raises(DataError, match="longer than"):
        load(document(merges=merges, next_merge_id=266 + 61, vocab_size=266 + 61))


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"vocab_size":NaN}'])
def test_what_is_not_a_table_is_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        TokenizerTable.load(data)


def test_an_oversized_file_is_refused_unread() -> None:
    with pytest.raises(DataError, match="at most 10"):
        TokenizerTable.load(b"x" * 11, max_file_bytes=10)


@given(st.binary(max_size=200))
def test_random_bytes_only_ever_raise_data_error(data: bytes) -> None:
    with pytest.raises(DataError):
        TokenizerTable.load(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)


@given(st.sampled_from(["vocab_size", "next_merge_id", "pattern", "sources_contributed", "merges"]), json_values)
def test_a_field_of_any_shape_gives_a_table_or_a_data_error(name: str, value: Any) -> None:
    try:
        table = load(document(**{name: value}))
    except DataError:
        return
    assert TokenizerTable.load(table.to_json()) == table


def test_a_run_can_pin_an_earlier_size() -> None:
    table = load(document())
    early = table.restricted_to(267)
    assert (early.merges, early.vocab_size) == (((H, I_),), 267)
    for wrong in (265, 269):
        with pytest.raises(DataError):
            table.restricted_to(wrong)


def test_the_empty_table_has_one_id_a_byte() -> None:
    assert byte_table().next_merge_id == 266
    assert TokenizerTable.load(byte_table().to_json()) == byte_table()
