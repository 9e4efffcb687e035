"""The aggregates behind values: those that are here, and those that are being fetched from others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from neuroshard.swarm.certified.bodies import Value
from neuroshard.swarm.certified.slices import Encoded, digest_of

Aggregate = tuple[Encoded, ...]
"""All encoded slices."""


class KnownValues:
    """By digest."""

    def __init__(self, is_slice: Callable[[int, Encoded], bool]) -> None:
        """`is_slice` tells whether bytes can be the slice of this number of an aggregate."""
        self._is_slice = is_slice
        self._known: dict[str, tuple[Value, Aggregate]] = {}
        self._wanted: dict[str, tuple[Value, dict[int, Encoded]]] = {}

    def add(self, value: Value, aggregate: Aggregate) -> None:
        """A value that is here with its aggregate."""
        self._known[value.digest] = value, aggregate
        self._wanted.pop(value.digest, None)

    def get(self, digest: str | None) -> tuple[Value, Aggregate] | None:
        """The value and its aggregate, when both are here."""
        return None if digest is None else self._known.get(digest)

    def want(self, value: Value) -> None:
        """Fetch the aggregate of this value."""
        if value.digest not in self._known:
            self._wanted.setdefault(value.digest, (value, {}))

    def wanted(self) -> Mapping[str, tuple[int, ...]]:
        """Which slices are missing, by the value's digest."""
        return {
            digest: tuple(index for index in range(len(value.aggregate)) if index not in come)
            for digest, (value, come) in sorted(self._wanted.items())
        }

    def take(self, digest: str, slices: Mapping[int, Encoded]) -> bool:
        """Slices that somebody sent; whether the aggregate is complete now. What does not fit its digest is dropped.

        So is what is no slice at all: voters that lie together could agree on it, and nobody could read it.
        """
        if digest not in self._wanted:
            return False
        value, come = self._wanted[digest]
        for index, content in slices.items():
            is_named = 0 <= index < len(value.aggregate) and digest_of(content).hex() == value.aggregate[index]
            if is_named and self._is_slice(index, content):
                come[index] = content
        if len(come) < len(value.aggregate):
            return False
        self.add(value, tuple(come[index] for index in range(len(value.aggregate))))
        return True
