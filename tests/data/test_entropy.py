from __future__ import annotations

import math

import numpy as np
import pytest

from neuroshard.data.entropy import unigram_entropy


def test_unigram_entropy_of_known_distributions() -> None:
    assert unigram_entropy(np.bincount(np.arange(8))) == pytest.approx(math.log(8))
    assert unigram_entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([7])) == 0.0
    assert unigram_entropy(np.array([2, 1])) == pytest.approx(math.log(3) - 2 / 3 * math.log(2))
    with pytest.raises(ValueError, match="no tokens"):
        unigram_entropy(np.array([0, 0]))
