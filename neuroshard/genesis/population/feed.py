"""Reading a source for the populator: tries again when reading fails for a while, and ends when it is told to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event

from neuroshard.errors import NeuroShardError
from neuroshard.genesis.population.source_log import SourceLog
from neuroshard.genesis.sources.records import DocumentSource, Position, Record, SourceFailureError

PAUSES_SECONDS = (1.0, 5.0, 30.0, 120.0)  # before each further try, when nothing was read in between


class BuildStoppedError(NeuroShardError):
    """Somebody asked the populator to stop; what is done stays done."""

    def __init__(self) -> None:
        super().__init__("Stopped.", "Give the same command again: it goes on.")


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
        """The source's records. Raises SourceFailureError after the last try, BuildStoppedError, DataError."""
        failures = 0
        while True:
            try:
                for record in self._reader.records():
                    if self._stop.is_set():
                        raise BuildStoppedError
                    failures = 0
                    yield record
            except SourceFailureError as error:
                if failures >= len(self._pauses):
                    raise
                self._log.say(f"{error} Trying again in {self._pauses[failures]:g} s.")
                if self._stop.wait(self._pauses[failures]):
                    raise BuildStoppedError from error
                failures += 1
                self._reader = self._source.open(self._reader.position())
            else:
                return
