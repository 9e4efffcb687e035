"""What can go wrong between a node that needs a stage's state and one that has it."""

from __future__ import annotations

from neuroshard.errors import NeuroShardError
from neuroshard.network import ScoreReason


class DonorError(NeuroShardError):
    """A node that cannot give what it was asked for now; another may."""


class LyingDonorError(DonorError):
    """A node whose data are not what they were said to be: nothing more of it is used."""

    def __init__(self, message: str, reason: ScoreReason = ScoreReason.UNEXPECTED_TENSOR) -> None:
        super().__init__(message)
        self.reason = reason  # what it costs the node's reputation


class SpoiltSnapshotError(LyingDonorError):
    """A snapshot that is of no use though it came as it was announced: the one who announced it is at fault."""
