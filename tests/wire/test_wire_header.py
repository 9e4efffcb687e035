"""The msgpack of headers: what is read is what was written, and no loophole of the format is open."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, cast

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.messages import MalformedFrameError
from neuroshard.messages.frame import MAX_DEPTH, MAX_VALUES, pack, unpack

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40)
    | st.binary(max_size=300)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=20), inner, max_size=20),
    max_leaves=40,
)


@given(values)
def test_a_value_survives(value: Any) -> None:
    packed = pack(value)
    assert unpack(packed) == value
    assert packed == msgpack.packb(value, use_bin_type=True)


@given(values, st.data())
def test_a_value_that_is_cut_anywhere_is_refused(value: Any, data: st.DataObject) -> None:
    packed = pack(value)
    with pytest.raises(MalformedFrameError):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


@given(st.binary(max_size=64))
def test_whatever_is_read_is_what_the_msgpack_package_reads(data: bytes) -> None:
    try:
        value = unpack(data)
    except MalformedFrameError:
        return
    assert repr(value) == repr(msgpack.unpackb(data))
    assert repr(unpack(pack(value))) == repr(value)


def test_tuples_and_read_only_maps_are_written_as_lists_and_maps() -> None:
    assert unpack(pack({"a": (1, 2), "b": MappingProxyType({"c": ()})})) == {"a": [1, 2], "b": {"c": []}}


@pytest.mark.parametrize("make", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_as_many_levels_as_allowed_and_not_one_more(make: Callable[[Any], Any]) -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = make(value)
    assert unpack(pack(value)) == value
    with pytest.raises(MalformedFrameError, match="nested deeper"):
        pack(make(value))
    with pytest.raises(MalformedFrameError, match="nested deeper"):
        unpack(msgpack.packb(make(value)))


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(MalformedFrameError, match="nested deeper"):
        pack(loop)


@pytest.mark.parametrize(
    ("largest", "larger"),
    [
        ([None] * (MAX_VALUES - 1), [None] * MAX_VALUES),
        ({str(i): 1 for i in range(MAX_VALUES // 2 - 1)}, {str(i): 1 for i in range(MAX_VALUES // 2)}),
    ],
    ids=["list", "map"],
)
def test_as_many_values_as_allowed_and_not_one_more(largest: Any, larger: Any) -> None:
    assert unpack(pack(largest)) == largest
    with pytest.raises(MalformedFrameError, match="more than"):
        pack(larger)
    with pytest.raises(MalformedFrameError, match="more than"):
        unpack(msgpack.packb(larger))


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
        {1, 2},
        1j,
        bytearray(b"a"),
        memoryview(b"a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_read_is_not_written(value: object) -> None:
    with pytest.raises(MalformedFrameError):
        pack(cast("Any", value))


def lying_containers() -> Iterator[Any]:
    for code, form in ((0xDC, ">H"), (0xDD, ">I"), (0xDE, ">H"), (0xDF, ">I")):
        key = b"\xa1k" if code >= 0xDE else b""
        for levels in (1, MAX_DEPTH, 1000):
            yield pytest.param(
                b"".join(bytes([code]) + struct.pack(form, 0xFFFF) + key for _ in range(levels)),
                id=f"{code:x} {levels} times",
            )


@pytest.mark.parametrize("data", list(lying_containers()))
def test_claimed_lengths_allocate_nothing(data: bytes) -> None:
    """A list is allocated by its claimed length in the msgpack package: 5 bytes would cost half a megabyte, nested."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrameError):
            unpack(data + bytes(60))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_full_header_of_empty_containers_takes_little_memory() -> None:
    data = b"\xdc\xff\x00" + b"\x80" * 0xFF00
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrameError, match="more than"):
            unpack(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 1024 * 1024
