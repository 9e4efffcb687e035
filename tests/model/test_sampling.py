"""Drawing the next token: greedy, nucleus, reproducible, and honest about bad logits."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from neuroshard.model.transformer import sample_next

LOGITS = torch.tensor([0.0, 2.0, 1.0, -inf, 1.5])


def draw(temperature: float, top_p: float, count: int = 400) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {sample_next(LOGITS, temperature, top_p, generator) for _ in range(count)}


def test_zero_temperature_is_greedy_and_a_tiny_nucleus_too() -> None:
    assert draw(0.0, 1.0, 3) == {1}
    assert draw(1.0, 1e-9, 20) == {1}
    assert draw(1e-30, 1.0, 20) == {1}


def test_forbidden_tokens_are_never_drawn_and_all_others_are() -> None:
    assert draw(1.0, 1.0) == {0, 1, 2, 4}


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    # probabilities 0.44, 0.27, 0.16, 0.06 ... of tokens 1, 4, 2, 0
    assert draw(1.0, 0.4) == {1}
    assert draw(1.0, 0.6) == {1, 4}
    assert draw(1.0, 0.9) == {1, 2, 4}


def test_frequencies_follow_the_softmax() -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.tensor([sample_next(LOGITS, 2.0, 1.0, generator) for _ in range(3000)])
    observed = torch.bincount(drawn, minlength=5) / 3000
    torch.testing.assert_close(observed, torch.softmax(LOGITS / 2, 0), atol=0.03, rtol=0)


def test_equal_generators_draw_equally() -> None:
    def sequence() -> list[int]:
        generator = torch.Generator().manual_seed(5)
        return [sample_next(LOGITS, 1.0, 0.95, generator) for _ in range(20)]

    assert sequence() == sequence()


@pytest.mark.parametrize("bad", [[nan, 0.0], [inf, 0.0], [-inf, -inf]])
def test_logits_that_say_nothing_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="logits"):
        sample_next(torch.tensor(bad), 1.0, 1.0, torch.Generator())


@pytest.mark.parametrize(("temperature", "top_p"), [(-1.0, 1.0), (nan, 1.0), (1.0, 0.0), (1.0, 1.1)])
def test_arguments_out_of_range_are_refused(temperature: float, top_p: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        sample_next(LOGITS, temperature, top_p, torch.Generator())
