"""What a node sent to a round and trained on from, as a file: a line of JSON, then the encoded slices.

A node that ends before its round needs it to tell the work that is in the aggregate from what it has done since.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from neuroshard.config.atomic_write import write_atomically
from neuroshard.identity import parse_json
from neuroshard.identity.fields import exact_object
from neuroshard.swarm.certified.slices import MAX_SLICES, digest_of
from neuroshard.swarm.claim_fields import hash_field, list_field, whole_field
from neuroshard.training.transfer.fields import LARGEST_NUMBER

FILE = "offer.bin"
_MAX_HEAD_BYTES = 16 * 1024


@dataclass(frozen=True)
class Offer:
    """A contribution, encoded."""

    step_id: str
    sequences: int  # whose work is in it
    parts: tuple[bytes, ...]


def write_offer(folder: Path, offer: Offer) -> None:
    """Put the offer in the place of the one before. Raises OSError."""
    fields = {
        "step": offer.step_id,
        "sequences": offer.sequences,
        "slices": [{"bytes": len(part), "digest": digest_of(part).hex()} for part in offer.parts],
    }
    write_atomically(folder / FILE, (json.dumps(fields).encode() + b"\n", *offer.parts))


def read_offer(folder: Path, step_id: str) -> Offer | None:
    """The offer to this step; None when the newest one was to another. Raises OSError, ValueError, DataError."""
    path = folder / FILE
    if not path.exists():
        return None
    with path.open("rb") as file:
        head = parse_json(file.readline(_MAX_HEAD_BYTES), _MAX_HEAD_BYTES)
        fields = exact_object(head, {"step", "sequences", "slices"}, "the offer")
        if fields["step"] != step_id:
            return None
        slices = [
            exact_object(one, {"bytes", "digest"}, "a slice")
            for one in list_field(fields["slices"], MAX_SLICES, "slices")
        ]
        size = path.stat().st_size
        sizes = [whole_field(one["bytes"], 0, size, "bytes") for one in slices]
        if file.tell() + sum(sizes) != size:
            raise ValueError("it has another size than it says")
        parts = tuple(file.read(count) for count in sizes)
    if any(
        digest_of(part).hex() != hash_field(one["digest"], "digest") for part, one in zip(parts, slices, strict=True)
    ):
        raise ValueError("a slice is damaged")
    return Offer(step_id, whole_field(fields["sequences"], 0, LARGEST_NUMBER, "sequences"), parts)
