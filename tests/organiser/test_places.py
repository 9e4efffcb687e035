"""Who gets the next place: fair order, no stage with more nodes than it wants, and rules that anybody can read."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from neuroshard.organiser.places import (
    SLOT_SECONDS,
    SLOTS,
    DownloadSlots,
    Joiner,
    StagePlaces,
    assigned,
    estimated_wait,
    stage_name,
)
from neuroshard.types import LayerRange, NodeId, WalletId

SIZES = st.integers(0, 3)
STAGES = st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=4)


def stage(index: int, wanted: int, memory_mb: int = 1, layers: int = 1) -> StagePlaces:
    return StagePlaces(f"stage-{index}", LayerRange(index, index + layers), memory_mb, wanted)


def worker(number: int, memory_mb: int = 9, layers_at_most: int = 0) -> Joiner:
    return Joiner(NodeId(f"node-{number}"), "worker", memory_mb, layers_at_most)


@given(STAGES, st.lists(SIZES, max_size=12), st.lists(SIZES, max_size=4))
def test_no_stage_gets_too_many_and_nobody_overtakes(
    sizes: list[tuple[int, int]], waiting: list[int], taken: list[int]
) -> None:
    stages = [stage(index, wanted, memory) for index, (wanted, memory) in enumerate(sizes)]
    held = {each.name: min(each.wanted, number) for each, number in zip(stages, taken, strict=False)}
    queue = [worker(number, memory) for number, memory in enumerate(waiting)]
    found = assigned(stages, held, queue)
    total = Counter(found.values()) + Counter(held)
    assert all(total[each.name] <= each.wanted for each in stages)
    for joiner in queue:  # one that gets no place fits none that is free at the end, or that a later one took
        if joiner.node not in found:
            fitting = [each.name for each in stages if joiner.fits(each)]
            later = queue[queue.index(joiner) + 1 :]
            assert all(total[name] == held.get(name, 0) + Counter(found.values())[name] for name in fitting)
            assert not any(found.get(other.node) in fitting for other in later)


def test_empty_stages_come_first_then_the_smallest_share() -> None:
    stages = [stage(0, 2), stage(1, 4)]
    found = assigned(stages, {}, [worker(number) for number in range(6)])
    assert list(found.values()) == ["stage-0", "stage-1", "stage-1", "stage-0", "stage-1", "stage-1"]


def test_a_node_fits_by_memory_layers_and_role() -> None:
    trainers = StagePlaces("trainer", None, 0, 1)
    assert worker(1, 5).fits(stage(0, 1, 5))
    assert not worker(1, 4).fits(stage(0, 1, 5))
    assert not worker(1, 9, layers_at_most=1).fits(stage(0, 1, 5, layers=2))
    trainer = Joiner(NodeId("node"), "trainer", 0)
    assert [trainer.fits(trainers), trainer.fits(stage(0, 1)), worker(1).fits(trainers)] == [True, False, False]


def test_the_names_of_stages() -> None:
    assert [stage_name(index, 4) for index in range(4)] == ["head-0", "body-0", "body-1", "tail-0"]
    assert [stage_name(0, 1), stage_name(1, 2)] == ["head-0", "tail-0"]


def test_the_wait_is_known_from_the_second_place_on() -> None:
    assert estimated_wait(1, [100.0], 100.0) is None
    assert estimated_wait(3, [0.0, 60.0, 160.0, 260.0], 300.0) == 300.0
    assert estimated_wait(1, [0.0, 60.0], 86_400.0 + 30) is None  # the first one is more than a day ago


def test_names_that_come_and_go_get_a_few_downloads_an_hour() -> None:
    """One named wallet does not use the slots of another one."""
    slots, ada, bob = DownloadSlots(), WalletId("ada"), WalletId("bob")
    for wallet in (None, ada, bob):
        found = [slots.may_download(NodeId(f"{wallet}-{number}"), wallet, 0.0) for number in range(SLOTS + 2)]
        assert found == [True] * SLOTS + [False] * 2
    assert slots.may_download(NodeId("None-0"), None, 5.0)  # a poll is no second download
    slots.note_admission(NodeId("None-0"))
    assert [slots.may_download(NodeId(f"later-{number}"), None, 5.0) for number in range(2)] == [True, False]
    assert slots.may_download(NodeId("later-1"), None, SLOT_SECONDS)
