"""The entropy of token frequencies: a baseline that a model must beat to have learned more than frequencies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unigram_entropy(counts: NDArray[np.integer[Any]]) -> float:
    """Return H = -sum p ln p in nats per token, for counts (vocabulary,): the loss of a frequency-only model.

    Raises ValueError when the counts are all zero.
    """
    total = int(counts.sum())
    if total == 0:
        raise ValueError("the entropy of no tokens is undefined")
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum())
