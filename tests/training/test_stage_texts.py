"""The table of texts at a stage: bounded, forgetful, and true to the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import trio
from torch import Tensor

from neuroshard.model.memory_need import CACHED_TEXTS
from neuroshard.model.weights import flatten, load_vector
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.pipeline.microbatch import (
    RefusedTensorError,
    Retry,
    SpoiltMicrobatchError,
    StageBusyError,
    StageGoneError,
    UnreadTextError,
)
from neuroshard.pipeline.stage_texts import StageTexts, TextLimits
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import NodeId
from tests.worlds.stages import TEXT_SHAPE, model_of, next_logits, prompt_ids, text_service_of

ME, OTHER = NodeId("me"), NodeId("other")
IDS = prompt_ids("the theory of it")
LIMITS = TextLimits()


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def texts_of(compute: ComputeThread, clock: Clock | None = None, executor: StageExecutor | None = None) -> StageTexts:
    executor = executor or text_service_of(compute, model_of()).executor
    return StageTexts(compute, executor, StageShapes.of(executor.model, 2), clock=clock or Clock())


def read(texts: StageTexts, ids: list[int], position: int = 0, session: int = 1, requester: NodeId = ME) -> Tensor:
    return trio.run(texts.read, requester, session, position, torch.tensor([ids]))


def test_a_text_is_read_piece_by_piece_as_in_one(compute: ComputeThread) -> None:
    texts = texts_of(compute)
    expected = next_logits(model_of(), IDS)
    read(texts, IDS[:2])
    read(texts, IDS[2:-1], 2)
    logits = read(texts, IDS[-1:], len(IDS) - 1)
    assert logits.shape == (TEXT_SHAPE.vocabulary_size,)
    seen = expected.isfinite()
    torch.testing.assert_close(logits[seen], expected[seen])


def test_texts_of_several_askers_do_not_touch_each_other(compute: ComputeThread) -> None:
    texts = texts_of(compute)
    alone = [read(texts, IDS), read(texts, [5], len(IDS))]
    read(texts, IDS[:2], session=2)
    read(texts, IDS[:2], requester=OTHER)
    read(texts, [4, 6], 2, requester=OTHER)
    assert torch.equal(read(texts, [7], len(IDS) + 1), one_piece(compute, [*IDS, 5], [7]))
    assert torch.equal(alone[1], one_piece(compute, IDS, [5]))
    assert texts.count == 3


def one_piece(compute: ComputeThread, before: list[int], then: list[int]) -> Tensor:
    """What a fresh stage says after two readings."""
    texts = texts_of(compute)
    first, rest = before[: len(IDS)], before[len(IDS) :]
    read(texts, first)
    for place, token in enumerate(rest):
        read(texts, [token], len(first) + place)
    return read(texts, then, len(before))


@pytest.mark.parametrize("position", [1, len(IDS) - 1, len(IDS) + 1, 10**12])
def test_tokens_out_of_place_are_refused_and_the_text_must_be_read_again(compute: ComputeThread, position: int) -> None:
    texts = texts_of(compute)
    read(texts, IDS)
    with pytest.raises(UnreadTextError) as refusal:
        read(texts, [5], position)
    assert refusal.value.retry is Retry.HERE
    with pytest.raises(UnreadTextError):  # nothing is left of it
        read(texts, [5], len(IDS))
    assert read(texts, IDS).isfinite().all()


def test_a_text_that_is_not_known_is_refused(compute: ComputeThread) -> None:
    with pytest.raises(UnreadTextError):
        read(texts_of(compute), [5], 3)


def trained(executor: StageExecutor) -> None:
    ids = torch.tensor([IDS])
    executor.loss(ids, ids)
    executor.step(1e-3, 1.0, ids.numel())


def loaded(executor: StageExecutor) -> None:
    load_vector(executor.model, flatten(executor.model) * 1.01)


@pytest.mark.parametrize("change", [trained, loaded])
def test_a_cache_is_of_use_only_to_the_weights_that_it_was_made_with(
    compute: ComputeThread, change: Callable[[StageExecutor], None]
) -> None:
    executor = text_service_of(compute, model_of()).executor
    texts = texts_of(compute, executor=executor)
    read(texts, IDS)
    change(executor)
    with pytest.raises(UnreadTextError):
        read(texts, [5], len(IDS))
    read(texts, IDS)
    assert read(texts, [5], len(IDS)).isfinite().all()


def test_gradients_that_are_accumulated_change_no_weights(compute: ComputeThread) -> None:
    executor = text_service_of(compute, model_of()).executor
    texts = texts_of(compute, executor=executor)
    read(texts, IDS)
    executor.loss(torch.tensor([IDS]), torch.tensor([IDS]))
    assert read(texts, [5], len(IDS)).isfinite().all()


def test_an_asker_and_all_together_keep_a_bounded_number(compute: ComputeThread) -> None:
    texts = texts_of(compute)
    for session in range(LIMITS.of_requester):
        read(texts, IDS, session=session)
    with pytest.raises(StageBusyError, match="of this node"):
        read(texts, IDS, session=99)
    for number in range(CACHED_TEXTS - LIMITS.of_requester):
        read(texts, IDS, requester=NodeId(f"asker {number}"))
    assert texts.count == CACHED_TEXTS
    for number in range(100):
        with pytest.raises(StageBusyError, match="are kept here"):
            read(texts, IDS, requester=NodeId(f"stranger {number}"))
    assert texts.count == CACHED_TEXTS
    texts.forget(ME, 0)
    read(texts, IDS, requester=OTHER)
    read(texts, [5], len(IDS), session=1)  # what is known goes on


def test_texts_end_when_they_are_idle_old_or_their_askers_gone(compute: ComputeThread) -> None:
    clock = Clock()
    texts = texts_of(compute, clock)
    read(texts, IDS)
    read(texts, IDS, requester=OTHER)
    texts.keep_only({ME})
    assert texts.count == 1
    clock.now += LIMITS.idle_seconds - 1
    read(texts, [5], len(IDS))
    read(texts, IDS, requester=OTHER)
    clock.now += 2
    texts.expire()
    assert texts.count == 2
    clock.now += LIMITS.idle_seconds
    texts.expire()
    assert texts.count == 0
    read(texts, IDS)
    ends = clock.now + LIMITS.most_seconds
    while clock.now < ends - 20:
        clock.now += 20
        read(texts, IDS)
    clock.now = ends + 1
    texts.expire()
    assert texts.count == 0


def test_a_pause_frees_the_texts_and_an_end_sends_elsewhere(compute: ComputeThread) -> None:
    service = text_service_of(compute, model_of())
    ids = torch.tensor([IDS])

    async def main() -> None:
        await service.read(ME, 1, 0, ids)
        await service.suspend()
        assert service.texts.count == 0
        with pytest.raises(StageBusyError, match="paused"):
            await service.read(ME, 1, 0, ids)
        await service.texts.read(ME, 1, 0, ids)  # what this node itself wants
        await service.resume()
        await service.read(ME, 1, 0, ids)
        await service.leave()
        with pytest.raises(StageGoneError):
            await service.read(ME, 1, len(IDS), ids[:, :1])

    trio.run(main)


@pytest.mark.parametrize(
    "inputs",
    [
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(1, TEXT_SHAPE.sequence_length + 1, dtype=torch.int64),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.full((1, 3), TEXT_SHAPE.vocabulary_size),
        torch.full((1, 3), -1),
        torch.zeros(1, 3, TEXT_SHAPE.hidden_size),
    ],
)
def test_what_is_no_text_is_refused(compute: ComputeThread, inputs: Tensor) -> None:
    with pytest.raises(RefusedTensorError):
        trio.run(texts_of(compute).read, ME, 1, 0, inputs)


def test_what_comes_out_as_no_numbers_is_told_and_leaves_no_cache(compute: ComputeThread) -> None:
    service = text_service_of(compute, model_of())
    with torch.no_grad():
        next(service.executor.model.parameters()).fill_(torch.nan)

    async def main() -> None:
        with pytest.raises(SpoiltMicrobatchError):
            await service.read(ME, 1, 0, torch.tensor([IDS]))
        with pytest.raises(UnreadTextError):
            await service.read(ME, 1, len(IDS), torch.tensor([[5]]))

    trio.run(main)
