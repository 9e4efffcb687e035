"""Reading a source for the populator: tries again when reading fails for a while, and ends when it is told to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event

from neuroshard.errors import StoppedError
from neuroshard.genesis.population.batches import Mark, TextBatch, text_batches
from neuroshard.genesis.population.source_log import SourceLog
from neuroshard.genesis.sources.records import (
    DocumentSource,
    Position,
    Record,
    SourceChangedError,
    SourceFailureError,
)

PAUSES_SECONDS = (1.0, 5.0, 30.0, 120.0)  # before each further try, when nothing was read in between


def stopped() -> StoppedError:
    """The error for a build that was asked to stop."""
    return StoppedError("The build was stopped.", "Give the same command again: it goes on.")


class PatientReader:
    """A RecordReader that bears failures of its source."""

    def __init__(
        self, source: DocumentSource, position: Position, *, log: SourceLog, stop: Event, pauses: Sequence[float]
    ) -> None:
        self._source = source
        self._reader = source.open(position)
        self._log = log
        self._stop = stop
        self._pauses = pauses

    def position(self) -> Position:
        """The place after the record given last."""
        return self._reader.position()

    def records(self) -> Iterator[Record]:
        """The source's records. Raises SourceFailureError after the last try, StoppedError, DataError."""
        failures = 0
        while True:
            try:
                for record in self._reader.records():
                    if self._stop.is_set():
                        raise stopped()
                    failures = 0
                    yield record
            except SourceChangedError:
                raise  # it does not pass by itself
            except SourceFailureError as error:
                if failures >= len(self._pauses):
                    raise
                self._log.say(f"{error} Trying again in {self._pauses[failures]:g} s.")
                if self._stop.wait(self._pauses[failures]):
                    raise stopped() from error
                failures += 1
                self._reader = self._source.open(self._reader.position())
            else:
                return


class Feed:
    """Batches of one source from a mark on, up to its end or until it fails for good or everything is to stop."""

    def __init__(self, reader: PatientReader, mark: Mark, log: SourceLog) -> None:
        """The reader stands at the mark's position."""
        self._reader = reader
        self._mark = mark
        self._log = log
        self.ended_by: SourceFailureError | StoppedError | None = None

    def batches(self) -> Iterator[TextBatch]:
        """Whole batches only: what ends them early must not change where they end. Raises DataError."""
        try:
            yield from text_batches(self._reader, self._mark, self._log.skipped)
        except (SourceFailureError, StoppedError) as error:
            self.ended_by = error
