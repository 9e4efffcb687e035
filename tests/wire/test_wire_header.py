"""The messages in headers: what is read is what was written, and no size or depth that a peer claims costs memory."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Annotated, Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from neuroshard.messages import MAX_HEADER_BYTES, MalformedFrameError
from neuroshard.messages.frame import MAX_DEPTH, MAX_ITEMS, pack, unpack

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(-1e300, 1e300, allow_nan=False)
    | st.text(max_size=40)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=20), inner, max_size=20),
    max_leaves=20,
).filter(lambda value: depth_of(value) < MAX_DEPTH)
messages = st.dictionaries(st.text(max_size=20), values, max_size=5)


class Vote(Struct, frozen=True, forbid_unknown_fields=True):
    view: Annotated[int, Meta(ge=0, le=10)]
    loss: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    digest: Annotated[bytes, Meta(max_length=32)] = b""
    nodes: Annotated[tuple[str, ...], Meta(max_length=3)] = ()


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@given(messages)
def test_a_message_without_a_declaration_survives(message: Any) -> None:
    assert unpack(pack(message)) == message


@given(messages, st.data())
def test_a_message_that_is_cut_anywhere_is_refused(message: Any, data: st.DataObject) -> None:
    packed = pack(message)
    with pytest.raises(MalformedFrameError):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


@given(st.binary(max_size=64))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for declared in (None, Vote):
        try:
            message = unpack(data, declared)
        except MalformedFrameError:
            continue
        assert repr(unpack(pack(message), declared)) == repr(message)


def test_tuples_and_read_only_mappings_are_written_as_lists_and_maps() -> None:
    assert unpack(pack({"a": (1, 2), "b": MappingProxyType({"c": ()})})) == {"a": [1, 2], "b": {"c": []}}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"view": 11}, "$.view"),
        ({"view": True}, "$.view"),
        ({"view": 1, "loss": math.nan}, "$.loss"),
        ({"view": 1, "loss": math.inf}, "$.loss"),
        ({"view": 1, "loss": -1.0}, "$.loss"),
        ({"view": 1, "digest": bytes(33)}, "$.digest"),
        ({"view": 1, "nodes": ["a"] * 4}, "$.nodes"),
        ({"view": 1, "nodes": ["a", 5]}, "$.nodes[1]"),
        ({}, "`view`"),
        ({"view": 1, "more": 2}, "`more`"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(MalformedFrameError) as caught:
        unpack(msgspec.msgpack.encode(fields), Vote)
    assert path in str(caught.value)


def test_a_message_beyond_its_bounds_is_not_sent() -> None:
    assert unpack(pack(Vote(10, math.pi, b"x" * 32, ("a",))), Vote) == Vote(10, math.pi, b"x" * 32, ("a",))
    with pytest.raises(MalformedFrameError, match=r"\$\.view"):
        pack(Vote(11))


@pytest.mark.parametrize("make", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_as_many_levels_as_allowed_and_not_one_more(make: Callable[[Any], Any]) -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH - 1):
        value = make(value)
    assert unpack(pack({"a": value})) == {"a": value}
    with pytest.raises(MalformedFrameError):
        pack({"a": make(value)})


def test_a_message_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(MalformedFrameError):
        pack({"a": loop})


@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01"])
@pytest.mark.parametrize("declared", [None, Vote])
def test_a_header_nested_as_deep_as_it_has_bytes_is_refused(nest: bytes, declared: type[Struct] | None) -> None:
    deep = nest * (MAX_HEADER_BYTES // len(nest))
    with pytest.raises(MalformedFrameError):
        unpack(b"\x81\xa4view" + deep, declared)


@pytest.mark.parametrize(
    ("largest", "larger"),
    [
        ([None] * MAX_ITEMS, [None] * (MAX_ITEMS + 1)),
        ({str(i): 1 for i in range(MAX_ITEMS)}, {str(i): 1 for i in range(MAX_ITEMS + 1)}),
    ],
    ids=["list", "map"],
)
def test_as_many_items_as_allowed_and_not_one_more(largest: Any, larger: Any) -> None:
    assert unpack(pack({"a": largest})) == {"a": largest}
    with pytest.raises(MalformedFrameError, match="<= 4096"):
        pack({"a": larger})


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        [math.inf],
        {"a": -math.inf},
        2**64,
        -(2**63) - 1,
        "\ud800",
        {1: 2},
        {b"a": 2},
        object(),
        1j,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_no_receiver_accepts_is_not_written(value: object) -> None:
    with pytest.raises(MalformedFrameError):
        pack({"a": cast("Any", value)})


def lying_containers() -> Iterator[Any]:
    for code, form, claimed in (
        (0xDC, ">H", 2**16 - 1),
        (0xDD, ">I", 2**31),
        (0xDE, ">H", 2**16 - 1),
        (0xDF, ">I", 2**31),
    ):
        key = b"\xa1k" if code >= 0xDE else b""
        for levels in (1, MAX_DEPTH, 1000):
            yield pytest.param(
                b"".join(bytes([code]) + struct.pack(form, claimed) + key for _ in range(levels)),
                id=f"{code:x} {levels} times",
            )


@pytest.mark.parametrize("data", list(lying_containers()))
@pytest.mark.parametrize("declared", [None, Vote])
def test_claimed_lengths_allocate_nothing(data: bytes, declared: type[Struct] | None) -> None:
    with pytest.raises(MalformedFrameError):
        unpack(b"\x81\xa1a", declared)  # makes the decoder
    tracemalloc.start()
    try:
        for field in (b"\xa1a", b"\xa5nodes"):
            with pytest.raises(MalformedFrameError):
                unpack(b"\x81" + field + data + bytes(60), declared)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("declared", [None, Vote])
def test_a_full_header_of_empty_containers_takes_little_memory(declared: type[Struct] | None) -> None:
    data = b"\x81\xa5nodes\xdc\xff\x00" + b"\x80" * 0xFF00
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrameError):
            unpack(data, declared)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 1024 * 1024
