"""Where the time of one request to a stage went."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.training.stage_frames import Operation

REMEMBERED_TIMINGS = 64  # of a hop: more than a driver's microbatches under way can have
TIMED = frozenset({Operation.FORWARD, Operation.LOSS, Operation.BACKWARD})  # a microbatch's requests


@dataclass(frozen=True)
class HopTiming:
    """One request that was answered."""

    operation: Operation
    session: int
    microbatch: int
    seconds: float  # from the request to the answer
    stage_seconds: float  # of those at the stage, says the stage
    compute_seconds: float  # of those at work, says the stage
    recompute_seconds: float = 0.0  # of those for a forward pass done again, says the stage
    bytes_sent: int = 0  # tensors only
    bytes_received: int = 0

    @property
    def wire_seconds(self) -> float:
        """On the way there and back."""
        return max(0.0, self.seconds - self.stage_seconds)

    @property
    def wait_seconds(self) -> float:
        """At the stage, but not at work."""
        return max(0.0, self.stage_seconds - self.compute_seconds)


def recompute_seconds(operation: Operation, forward_seconds: float, compute_seconds: float) -> float:
    """What a stage that keeps only its inputs spends again in a request: in the backward pass the forward pass."""
    return min(forward_seconds, compute_seconds) if operation is Operation.BACKWARD else 0.0
