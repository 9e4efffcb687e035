from __future__ import annotations

import pytest

from benchmarks.membership import simulate


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_hundred_nodes_know_each_other_and_gossip_costs_each_no_more_than_in_a_hundred() -> None:
    small = simulate(100, settle_seconds=4, window_seconds=30)
    large = simulate(200, settle_seconds=4, window_seconds=10)
    for outcome in (small, large):
        assert outcome.converged_after is not None
        assert outcome.converged_after < 2
        assert outcome.known == outcome.nodes * (outcome.nodes - 1)
    assert 0.7 * small.bytes_per_second <= large.bytes_per_second <= 1.3 * small.bytes_per_second
    assert large.bytes_a_copy <= 1.05 * small.bytes_a_copy
