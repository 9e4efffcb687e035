"""A round trip that was measured while a loop was busy is not shown as the connection's."""

from __future__ import annotations

import pytest

from neuroshard.network.libp2p.streams import KEPT, RoundTrips


def test_a_slow_first_answer_is_forgotten_with_the_next_one() -> None:
    trips = RoundTrips()
    assert trips.least is None
    trips.add(1.853)
    assert trips.least == pytest.approx(1.853)
    assert not trips.are_enough
    trips.add(0.002)
    assert trips.least == pytest.approx(0.002)


def test_a_line_that_became_slower_is_shown_so_after_a_few() -> None:
    trips = RoundTrips()
    for seconds in (0.01, *[0.2] * KEPT):
        trips.add(seconds)
    assert trips.are_enough
    assert trips.least == pytest.approx(0.2)
