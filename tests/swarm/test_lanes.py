from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from neuroshard.pipeline.replica_routing import StickyRoute, sticky_order
from neuroshard.types import NodeId

ROOT, NEXT_ROOT = b"\x01" * 32, b"\x02" * 32
ME = NodeId("driver")
REPLICAS = tuple(NodeId(f"replica {n}") for n in range(8))
DRIVERS = tuple(NodeId(f"driver {n}") for n in range(1600))

names = st.sets(st.sampled_from(REPLICAS))


def lane(root: bytes, driver: NodeId, stage: int, replicas: Iterable[NodeId]) -> NodeId | None:
    return StickyRoute.drawn(driver, stage, root, replicas).node


def lanes_of_all(root: bytes, stage: int, replicas: tuple[NodeId, ...] = REPLICAS) -> dict[NodeId, NodeId | None]:
    return {driver: lane(root, driver, stage, replicas) for driver in DRIVERS}


def test_lanes_of_many_drivers_load_the_replicas_evenly() -> None:
    for stage in range(3):
        counts = Counter(lanes_of_all(ROOT, stage).values())
        assert len(counts) == 8
        # 200 each are expected; 7 degrees of freedom, and the chance of more than 24.3 is one in a thousand
        assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 24.3


def test_lanes_of_different_stages_and_roots_have_nothing_to_do_with_each_other() -> None:
    first = lanes_of_all(ROOT, 0)
    for other in (lanes_of_all(ROOT, 1), lanes_of_all(NEXT_ROOT, 0)):
        same = sum(first[driver] == other[driver] for driver in DRIVERS)
        assert 140 <= same <= 260  # one in eight by chance


def test_everybody_draws_the_same_lane_whatever_the_order_of_its_list() -> None:
    assert lane(ROOT, ME, 1, REPLICAS) == lane(ROOT, ME, 1, reversed(REPLICAS)) == lane(ROOT, ME, 1, REPLICAS * 2)


def test_when_a_replica_leaves_only_its_own_lanes_change_and_spread_over_the_others() -> None:
    before, after = lanes_of_all(ROOT, 0), lanes_of_all(ROOT, 0, REPLICAS[1:])
    moved = [driver for driver in DRIVERS if before[driver] != after[driver]]
    assert moved == [driver for driver in DRIVERS if before[driver] == REPLICAS[0]]
    assert len({after[driver] for driver in moved}) == 7


def test_a_hostile_replica_gets_its_share_of_drivers_and_others_when_lanes_are_drawn_anew() -> None:
    hostile = REPLICAS[3]
    touched = [{d for d, node in lanes_of_all(root, 0).items() if node == hostile} for root in (ROOT, NEXT_ROOT)]
    assert all(140 <= len(drivers) <= 260 for drivers in touched)
    assert len(touched[0] & touched[1]) < 60


def test_a_stage_without_replicas_has_no_lane() -> None:
    assert StickyRoute.drawn(ME, 1, ROOT, ()).node is None
    assert StickyRoute.drawn(ME, 1, ROOT, REPLICAS[:1]).seen(ROOT, ()).node is None


def test_a_lane_changes_on_failure_to_the_next_in_the_order_and_goes_round() -> None:
    kept = StickyRoute.drawn(ME, 0, ROOT, REPLICAS[:3])
    order = sticky_order(ROOT, ME, 0, REPLICAS[:3])
    for failing, following in ((0, 1), (1, 2), (2, 0), (0, 1)):
        assert kept.node == order[failing]
        kept = kept.after_failure(order[failing])
        assert kept.node == order[following]


def test_a_late_failure_of_a_replica_that_is_no_lane_changes_no_lane() -> None:
    kept = StickyRoute.drawn(ME, 0, ROOT, REPLICAS)
    assert kept.after_failure(kept.order[4]).node == kept.node
    assert kept.after_failure(NodeId("stranger")) == kept


def test_another_root_draws_anew_and_forgives() -> None:
    kept = StickyRoute.drawn(ME, 0, ROOT, REPLICAS)
    for node in REPLICAS[:5]:
        kept = kept.after_failure(node)
    assert kept.seen(NEXT_ROOT, REPLICAS) == StickyRoute.drawn(ME, 0, NEXT_ROOT, REPLICAS)


@given(first=names, later=st.lists(names, max_size=8))
def test_a_lane_stays_while_its_replica_does(first: set[NodeId], later: list[set[NodeId]]) -> None:
    kept = StickyRoute.drawn(ME, 0, ROOT, first)
    for present in later:
        before, kept = kept.node, kept.seen(ROOT, present)
        assert set(kept.order) == present
        if before in present:
            assert kept.node == before
        assert kept.node in present or not present


def test_a_newcomer_takes_no_lane_before_the_next_root_however_its_hash_falls() -> None:
    names = (NodeId(f"newcomer {n}") for n in range(10_000))
    newcomer = next(name for name in names if lane(ROOT, ME, 0, [*REPLICAS, name]) == name)
    kept = StickyRoute.drawn(ME, 0, ROOT, REPLICAS).seen(ROOT, [*REPLICAS, newcomer])
    assert kept.node == lane(ROOT, ME, 0, REPLICAS)
    assert kept.order[-1] == newcomer
