"""What a driver remembers of its microbatches, so that people can be told how they go. Bounded; one event loop's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from neuroshard.status.pipeline import Passage, PipelineFlow
from neuroshard.training.flow import flow_of, passage_of
from neuroshard.training.microbatch_run import MicrobatchRun

WINDOW_SECONDS = 60.0
REMEMBERED_PASSAGES = 32
MOST_HOPS = 2048  # in the window: where there are more, the numbers cover less than a minute
FOLD_SECONDS = 1.0  # the numbers are made anew so often at most


@dataclass(frozen=True)
class FlowCounts:
    """Since the start."""

    exact_takeovers: int = 0
    approximate_takeovers: int = 0
    failures: int = 0
    given_up: int = 0

    def with_run(self, run: MicrobatchRun) -> FlowCounts:
        """What happened to one more microbatch counts, too."""
        exact = sum(one.is_exact for one in run.replacements)
        return replace(
            self,
            exact_takeovers=self.exact_takeovers + exact,
            approximate_takeovers=self.approximate_takeovers + len(run.replacements) - exact,
            failures=self.failures + run.failures,
        )


class FlowRecord:
    """Is told when microbatches begin and end. Its window is what ended within the last minute."""

    def __init__(self, stage_count: int, *, monotonic: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """`wall_clock` in seconds since the epoch."""
        self._monotonic = monotonic
        self._wall_clock = wall_clock
        self._counts = FlowCounts()
        self._under_way: dict[MicrobatchRun, float] = {}  # and when they began
        self._window: deque[tuple[float, Passage]] = deque()  # and when they ended
        self._most = max(REMEMBERED_PASSAGES, MOST_HOPS // stage_count)
        self._since: float | None = None  # all that ended after it is in the window
        self._recent: deque[Passage] = deque(maxlen=REMEMBERED_PASSAGES)
        self._folded = PipelineFlow()
        self._folded_at = -FOLD_SECONDS

    def began(self, run: MicrobatchRun) -> None:
        """A microbatch enters the first stage."""
        now = self._under_way[run] = self._monotonic()
        if self._since is None:
            self._since = now

    def accumulated(self, run: MicrobatchRun) -> None:
        """Every stage has done its work for it."""
        now = self._monotonic()
        passage = passage_of(run, ended_at=self._wall_clock(), seconds=now - self._under_way[run])
        self._recent.append(passage)
        self._window.append((now, passage))
        if len(self._window) > self._most:
            self._since, _ = self._window.popleft()

    def gave_up(self) -> None:
        """A microbatch was left out for good."""
        self._counts = replace(self._counts, given_up=self._counts.given_up + 1)

    def ended(self, run: MicrobatchRun) -> None:
        """It is under way no more, whatever came of it."""
        del self._under_way[run]
        self._counts = self._counts.with_run(run)

    def flow(self) -> PipelineFlow:
        """The numbers now; those of the window may be a second old."""
        now = self._monotonic()
        if self._since is not None and now - self._folded_at >= FOLD_SECONDS:
            self._folded, self._folded_at = flow_of(self._passages(now), now - self._since), now
        counts = self._counts
        for run in self._under_way:
            counts = counts.with_run(run)
        waited_for = {run.waits_for for run in self._under_way if run.waits_for is not None}
        return replace(self._folded, recent=tuple(self._recent), unanswered=tuple(sorted(waited_for)), **vars(counts))

    def _passages(self, now: float) -> list[Passage]:
        oldest = now - WINDOW_SECONDS
        while self._window and self._window[0][0] < oldest:
            self._window.popleft()
        if self._since is not None:
            self._since = max(self._since, oldest)
        return [passage for _, passage in self._window]
