"""What every destination does, whatever it is."""

from __future__ import annotations

import pytest

from neuroshard.dataset.destination import Destination
from neuroshard.dataset.object_store import Condition, Version
from neuroshard.errors import ConflictError, DataError


def refuses_a_large_object_before_it_is_read(destination: Destination) -> None:
    destination.write("manifest.json", b"x" * 101)
    with pytest.raises(DataError, match="101 bytes, at most 100"):
        destination.read("manifest.json", 100)


def writes_only_under_its_condition(destination: Destination, no_version_of_its: Version) -> None:
    first = destination.write("checkpoints.json", b"1", expected=Condition.ABSENT)
    for wrong in (Condition.ABSENT, no_version_of_its):
        with pytest.raises(ConflictError, match="changed by somebody else"):
            destination.write("checkpoints.json", b"2", expected=wrong)
    second = destination.write("checkpoints.json", b"2", expected=first)
    assert second != first
    with pytest.raises(ConflictError):
        destination.write("checkpoints.json", b"3", expected=first)
    there = destination.read("checkpoints.json", 10)
    assert there is not None
    assert there.content == b"2"
    with pytest.raises(ConflictError):
        destination.write("nothing.json", b"", expected=first)
