"""One step, one hop and one round stay short walks. `python -m tests.meta.walks` prints them."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from walks import BUDGETS, Size, recorded


@pytest.mark.parametrize("name", BUDGETS)
def test_a_walk_stays_within_its_budget(name: str) -> None:
    """If a walk became shorter, write the smaller numbers into `BUDGETS`; they never grow."""
    walk, budget = recorded(name), BUDGETS[name].today
    assert walk.files, "nothing was recorded"
    within = is_within(walk.size, budget)
    assert within, f"{walk.size} is above {budget}; `python -m tests.meta.walks {name} --names` lists the walk"


def is_within(size: Size, budget: Size) -> bool:
    return all(count <= most for count, most in zip(astuple(size), astuple(budget), strict=True))
