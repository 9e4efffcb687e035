"""One step, one hop and one round stay short walks. `python -m tests.meta.walks` prints them."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from walks import BUDGETS, Size, recorded


@pytest.mark.parametrize("name", BUDGETS)
def test_a_walk_stays_within_its_budget(name: str) -> None:
    """If a walk became shorter, write the smaller numbers into `BUDGETS`; they never grow.

    On a busy machine a timer can end during the recording and add its function: one of two recordings must fit.
    """
    budget = BUDGETS[name].today
    for _ in range(2):
        walk = recorded(name)
        assert walk.files, "nothing was recorded"
        if is_within(walk.size, budget):
            return
    pytest.fail(f"{walk.size} is above {budget}; `python -m tests.meta.walks {name} --names` lists the walk")


def is_within(size: Size, budget: Size) -> bool:
    return all(count <= most for count, most in zip(astuple(size), astuple(budget), strict=True))
