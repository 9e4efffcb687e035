"""What token frequencies alone tell: the yardstick for a model that has learned more than them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unigram_entropy(counts: NDArray[np.integer[Any]]) -> float:
    """H = -sum p ln p in nats a token, for counts (vocabulary,): the loss of a model that knows frequencies only.

    Raises ValueError when nothing was counted.
    """
    total = int(counts.sum())
    if total == 0:
        raise ValueError("the entropy of no tokens is undefined")
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum())
