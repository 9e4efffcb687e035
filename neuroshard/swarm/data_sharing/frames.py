"""How a file of the data set is asked for and given, part by part. Pure.

The asker knows the digest of what it wants, so a part carries no proof of its own: the whole file does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from neuroshard.data.packed import PackedLayout
from neuroshard.identity.fields import exact_object, text_field
from neuroshard.network import RequestRefusedError
from neuroshard.swarm.claim_fields import hash_field, list_field, run_field, whole_field
from neuroshard.types import JsonValue, RunId
from neuroshard.wire import Frame, FrameLimits, MalformedFrameError, TensorPart, TensorSpec, UnexpectedTensorError

DATA = "data/part"
PART_BYTES = 256 * 1024
MAX_HEADER_BYTES = 1024
REQUEST_LIMITS = FrameLimits(MAX_HEADER_BYTES)
ANSWER_LIMITS = FrameLimits(MAX_HEADER_BYTES, PART_BYTES)
_MAX_NAME_CHARACTERS = 100
_MAX_BYTES = 1 << 40


@dataclass(frozen=True)
class Wanted:
    """A part of a file whose exact contents `address` names."""

    run_id: RunId
    name: str  # in the Genesis folder
    address: str  # 64 hex digits
    start: int = 0  # of the packed form


@dataclass(frozen=True)
class Given:
    """A part, and what the whole is like."""

    layout: PackedLayout
    data: bytes


def request_frame(wanted: Wanted) -> Frame:
    """Asks for the part that begins at `start`."""
    fields = {"run": wanted.run_id, "name": wanted.name, "address": wanted.address, "start": wanted.start}
    return Frame(DATA, fields)


def read_request(frame: Frame) -> Wanted:
    """What is asked for. Raises RequestRefusedError."""
    try:
        fields = exact_object(cast("JsonValue", frame.header), {"run", "name", "address", "start"}, "the header")
        return Wanted(
            run_field(fields["run"], "run"),
            text_field(fields["name"], _MAX_NAME_CHARACTERS, "name"),
            hash_field(fields["address"], "address"),
            whole_field(fields["start"], 0, _MAX_BYTES, "start"),
        )
    except ValueError as error:
        raise RequestRefusedError(f"The request cannot be read: {error}.") from None


def part_size(layout: PackedLayout, start: int) -> int:
    """How many bytes the part that begins at `start` has."""
    return max(0, min(PART_BYTES, layout.packed_bytes - start))


def answer_frame(given: Given) -> Frame:
    """The answer."""
    layout = given.layout
    numbers = [layout.before_bytes, layout.token_count, layout.item_bytes, layout.after_bytes]
    part = TensorPart(TensorSpec("part", "uint8", (len(given.data),)), given.data)
    return Frame(DATA, {"layout": numbers}, (part,))


def read_answer(frame: Frame, start: int) -> Given:
    """The part that begins at `start`. Raises MalformedFrameError, UnexpectedTensorError."""
    try:
        fields = exact_object(cast("JsonValue", frame.header), {"layout"}, "the header")
        numbers = [whole_field(item, 0, _MAX_BYTES, "layout") for item in list_field(fields["layout"], 4, "layout")]
        before, tokens, item_bytes, after = numbers  # ValueError for fewer
        layout = PackedLayout(before, tokens, item_bytes, after)
    except ValueError as error:
        raise MalformedFrameError(f"A part of the data cannot be read: {error}.") from None
    expected = TensorSpec("part", "uint8", (part_size(layout, start),))
    if not expected.byte_count or [part.spec for part in frame.tensors] != [expected]:
        raise UnexpectedTensorError("A part of the data has another size than it should have.")
    return Given(layout, bytes(frame.tensors[0].data))
