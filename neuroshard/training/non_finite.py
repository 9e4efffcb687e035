"""What to do about steps whose loss or gradient is not finite: a pure policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

STEPS_BEFORE_RESTORE = 3


@dataclass(frozen=True)
class NonFinitePolicy:
    """Counts skipped steps; several in a row mean that the weights are spoilt, not the data."""

    skipped: int = 0  # since the start of the run
    in_a_row: int = 0
    last_step: int | None = None  # the step that was tried when the last one was skipped

    def after_step(self, step: int, finite: bool) -> NonFinitePolicy:
        """The policy after a step was applied (finite) or skipped."""
        if finite:
            return replace(self, in_a_row=0)
        return NonFinitePolicy(self.skipped + 1, self.in_a_row + 1, step)

    @property
    def must_restore(self) -> bool:
        """Whether to go back to the last good checkpoint and pause."""
        return self.in_a_row >= STEPS_BEFORE_RESTORE

    def restored(self) -> NonFinitePolicy:
        """After the last good checkpoint is in place."""
        return replace(self, in_a_row=0)
