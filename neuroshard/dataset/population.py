"""The populator: reads sources in order of priority, learns the vocabulary, tokenises, and writes shards.

Every document is encoded with BOS before and EOS after it. The documents of a source follow one another in the order
of the source, without padding, and are cut into shards of equal size. A shard has tokens of one source only; tokens
left over at the end of a source wait until the source grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from neuroshard.data.shard_file import ShardFormat
from neuroshard.data.tokenizer import LLAMA_PATTERN, TokenizerTable, byte_table, count_words, learn_from_counts
from neuroshard.dataset.batches import Mark, Packer, TextBatch, text_batches
from neuroshard.dataset.destination import Destination
from neuroshard.dataset.encoding import EncodedBatch, Encoding, open_encoding
from neuroshard.dataset.packing import MIN_SHARDS, common_shard_tokens
from neuroshard.dataset.population_state import Ledger
from neuroshard.dataset.progress import PopulationProgress, SourceLog, SourceProgress
from neuroshard.dataset.records import (
    DocumentSource,
    PopulationSource,
    Position,
    SourceChangedError,
    SourceFailureError,
    SourceRecord,
)
from neuroshard.dataset.source_configuration import PopulationConfiguration, VocabularyConfiguration
from neuroshard.dataset.sources import open_document_source
from neuroshard.errors import StoppedError
from neuroshard.identity.signing import Signer

PAUSES_SECONDS = (1.0, 5.0, 30.0, 120.0)  # before each retry without progress


def stopped_error() -> StoppedError:
    """Return the error for a build that was asked to stop."""
    return StoppedError("The build was stopped.", "Run the same command again to continue.")


class RetryingReader:
    """A RecordReader that retries after failures of its source."""

    def __init__(
        self, source: DocumentSource, position: Position, *, log: SourceLog, stop: Event, pauses: Sequence[float]
    ) -> None:
        self._source = source
        self._reader = source.open(position)
        self._log = log
        self._stop = stop
        self._pauses = pauses

    def position(self) -> Position:
        return self._reader.position()

    def records(self) -> Iterator[SourceRecord]:
        """Yield the source's records. Raises SourceFailureError after the last try, StoppedError, DataError."""
        failures = 0
        while True:
            try:
                for record in self._reader.records():
                    if self._stop.is_set():
                        raise stopped_error()
                    failures = 0
                    yield record
            except SourceChangedError:
                raise  # a retry would not help
            except SourceFailureError as error:
                if failures >= len(self._pauses):
                    raise
                self._log.say(f"{error} Trying again in {self._pauses[failures]:g} s.")
                if self._stop.wait(self._pauses[failures]):
                    raise stopped_error() from error
                failures += 1
                self._reader = self._source.open(self._reader.position())
            else:
                return


class BatchReader:
    """Reads batches of one source from a mark to its end, its permanent failure, or a stop request."""

    def __init__(self, reader: RetryingReader, mark: Mark, log: SourceLog) -> None:
        """The reader must be at the mark's position."""
        self._reader = reader
        self._mark = mark
        self._log = log
        self.ended_by: SourceFailureError | StoppedError | None = None

    def batches(self) -> Iterator[TextBatch]:
        """Yield whole batches only: an early end must not change batch boundaries. Raises DataError."""
        try:
            yield from text_batches(self._reader, self._mark, self._log.skipped)
        except (SourceFailureError, StoppedError) as error:
            self.ended_by = error


# A large sample is truncated, so that counting its words fits in memory.
MAX_SAMPLE_CHARACTERS = 128 << 20  # of a source
MAX_DOCUMENT_CHARACTERS = 1 << 20  # of one document


def merge_shares(targets: Mapping[str, int], vocabulary: VocabularyConfiguration) -> dict[str, int]:
    """Return the merges that each source should teach; together `vocabulary.merges`.

    `targets` maps each source, in order, to its target_shards.

    A single source teaches all. Otherwise the first teaches `first_source_merges` and the others the rest, in
    proportion to their target_shards, rounded by largest remainder.
    """
    first, *others = targets
    if not others:
        return {first: vocabulary.merges}
    shares = {first: min(vocabulary.first_source_merges, vocabulary.merges)}
    rest, weight = vocabulary.merges - shares[first], sum(targets[name] for name in others)
    for name in others:
        shares[name] = rest * targets[name] // weight
    by_remainder = sorted(others, key=lambda name: -(rest * targets[name] % weight))
    for name in by_remainder[: vocabulary.merges - sum(shares.values())]:
        shares[name] += 1
    return shares


def sample(records: Iterator[SourceRecord], documents: int) -> Iterator[str]:
    """Yield the texts of the first documents with text; fewer when they are very large."""
    characters = 0
    for record in records:
        if not record.text.strip():
            continue
        yield record.text[:MAX_DOCUMENT_CHARACTERS]
        documents -= 1
        characters += min(len(record.text), MAX_DOCUMENT_CHARACTERS)
        if documents <= 0 or characters >= MAX_SAMPLE_CHARACTERS:
            return


def grow_table(
    base: TokenizerTable | None,
    wanted: Mapping[str, int],
    samples: Callable[[str], Iterator[str]],
    most_merges: int,
    progress: Callable[[str, float], None],
) -> TokenizerTable:
    """Append the wanted merges of each source in turn to the base (None: bytes alone), at most `most_merges` in all.

    Merges that one source cannot teach, because no pair of tokens occurs twice in its sample any more, pass to the
    next.
    """
    table, owed = base or byte_table(LLAMA_PATTERN), 0
    for name, share in wanted.items():
        count = min(share + owed, most_merges - len(table.merges))
        if count <= 0:
            continue
        progress(name, 0.0)
        words = count_words(samples(name), table.pattern)
        before = len(table.merges)
        table = learn_from_counts(words, count, table, name, lambda fraction, name=name: progress(name, fraction))
        owed = count - (len(table.merges) - before)
    return table


@dataclass(frozen=True)
class PopulationOptions:
    """Options of a population; only the shard format changes the result."""

    workers: int  # processes that tokenise; 0: the calling process does
    logs: Path | None  # folder; None: no logs
    publish_seconds: float = 30.0  # between two manifests while shards are made
    follow_seconds: float | None = None  # between two checks of growing sources; None ends with the sources
    pauses_seconds: Sequence[float] = PAUSES_SECONDS
    shard_format: ShardFormat | None = None  # None: keep the format of a continued build, `bin` for a new one


@dataclass(frozen=True)
class PopulationDependencies:
    """The populator's external dependencies. `date` is ISO 8601; `clock` counts seconds and never goes back."""

    date: Callable[[], str]
    clock: Callable[[], float]
    stop: Event
    progress: PopulationProgress


@dataclass(frozen=True)
class PopulationPlan:
    """The content of a population. `sources` are in order of priority, each with a name of its own."""

    sources: Sequence[PopulationSource]
    vocabulary: VocabularyConfiguration
    max_shard_tokens: int  # too little text for 16 shards of this size gives smaller shards

    @classmethod
    def of(cls, configuration: PopulationConfiguration, *, follows: bool = False) -> PopulationPlan:
        """Open the sources of a configuration. With `follows`, they may grow while they are read.

        Raises UsageError when a library that a source needs is not installed.
        """
        sources = [
            PopulationSource(item.name, item.origin, item.target_shards, open_document_source(item, follows=follows))
            for item in configuration.active()
        ]
        return cls(sources, configuration.vocabulary, configuration.tokens_per_shard)


@dataclass(frozen=True)
class PopulationReport:
    """The result of a population; `failures` has the reason for each source that could not be read to its end."""

    shards: int
    tokens: int
    tokens_per_shard: int  # 0 as long as there are none
    vocabulary: int
    shards_by_source: dict[str, int]
    is_stopped: bool
    failures: dict[str, str]


def populate(
    plan: PopulationPlan,
    destination: Destination,
    signer: Signer,
    options: PopulationOptions,
    surroundings: PopulationDependencies,
) -> PopulationReport:
    """Create the data set, or continue it.

    Raises DataError for sources that cannot be used, StorageError and DiskFullError when the destination cannot be
    written, ConflictError when another process writes to it, StoppedError when it was stopped before the first tokens.
    """
    with destination.claim("genesis build"), ExitStack() as stack:
        logs = {source.name: stack.enter_context(SourceLog(options.logs, source.name)) for source in plan.sources}
        ledger = Ledger(destination, signer, surroundings.date, options.shard_format)
        return _Population(plan, ledger, options, surroundings, logs).run()


@dataclass
class _SourceRun:
    """A source and its progress in this run."""

    name: str
    target_shards: int
    log: SourceLog
    packer: Packer
    tokens: int = 0
    text_bytes: int = 0
    seconds: float = 0.0

    def take(self, encoded: EncodedBatch) -> None:
        self.packer.add(encoded.ids, encoded.mark)
        self.tokens += len(encoded.ids)
        self.text_bytes += encoded.text_bytes


class _Population:
    """One run of the populator over its sources."""

    def __init__(
        self,
        plan: PopulationPlan,
        ledger: Ledger,
        options: PopulationOptions,
        surroundings: PopulationDependencies,
        logs: Mapping[str, SourceLog],
    ) -> None:
        self._vocabulary = plan.vocabulary
        self._most_shard_tokens = plan.max_shard_tokens
        self._sources = plan.sources
        self._documents = {source.name: source.documents for source in plan.sources}
        self._ledger = ledger
        self._options = options
        self._surroundings = surroundings
        self._logs = logs
        self._runs: list[_SourceRun] = []
        self._failures: dict[str, str] = {}
        self._published_at = surroundings.clock()

    def run(self) -> PopulationReport:
        """Learn the vocabulary and read all sources; then repeat while the sources are followed."""
        self._ledger.take_sources(self._sources)
        table = self._learn(self._ledger.load_table())
        checkpoints = self._ledger.checkpoints
        for source in self._sources:
            at = checkpoints.sources[source.name]
            packer = Packer(at.mark, at.leftover)
            self._runs.append(_SourceRun(source.name, source.target_shards, self._logs[source.name], packer))
        with open_encoding(table, self._options.workers) as encode:
            while True:
                self._pass(encode)
                self._ledger.publish()
                wait = self._options.follow_seconds
                if wait is None or self._surroundings.stop.wait(wait):
                    return self._report(table)

    def _learn(self, table: TokenizerTable | None) -> TokenizerTable:
        """Grow the table by the merges that sources should teach and were not asked for before."""
        size = self._ledger.checkpoints.tokens_per_shard if table is not None else None
        if size is not None:
            self._ledger.open_writer(size)
            self._ledger.publish()  # with the table that made the newest shards
        asked = self._ledger.asked_merges()
        shares = merge_shares({source.name: source.target_shards for source in self._sources}, self._vocabulary)
        wanted = {name: share - asked.get(name, 0) for name, share in shares.items()}
        grown = grow_table(table, wanted, self._samples, self._vocabulary.merges, self._learning)
        self._ledger.take_table(grown, shares, self._sources)
        return grown

    def _samples(self, name: str) -> Iterator[str]:
        return sample(self._reader(name, {}).records(), self._vocabulary.sample_documents)

    def _learning(self, source: str, fraction: float) -> None:
        if self._surroundings.stop.is_set():
            raise stopped_error()
        self._surroundings.progress.learning(source, fraction)

    def _reader(self, name: str, position: Position) -> RetryingReader:
        pauses, stop = self._options.pauses_seconds, self._surroundings.stop
        return RetryingReader(self._documents[name], position, log=self._logs[name], stop=stop, pauses=pauses)

    def _pass(self, encode: Encoding) -> None:
        """Read every source once, up to its end."""
        self._failures.clear()
        for run in self._runs:
            self._populate(run, encode)
            if self._surroundings.stop.is_set():
                return
        if self._size is None and not self._failures:
            supplies = [(run.packer.tokens, run.target_shards) for run in self._runs]
            self._settle(common_shard_tokens(supplies, self._most_shard_tokens))

    def _populate(self, run: _SourceRun, encode: Encoding) -> None:
        self._make_shards(run)  # an earlier remainder may be enough for some shards
        if self._has_enough(run):
            return
        began, before = self._surroundings.clock(), run.seconds
        reached = run.packer.reached
        feed = BatchReader(self._reader(run.name, reached.position), reached, run.log)
        run.log.say(f"reading on after {reached.documents:,} documents")
        with closing(encode(feed.batches())) as encoded_batches:
            for encoded in encoded_batches:
                run.take(encoded)
                run.seconds = before + self._surroundings.clock() - began
                self._make_shards(run)
                self._surroundings.progress.tokenising(self._status(run))
                if self._has_enough(run):
                    break
        if isinstance(feed.ended_by, SourceFailureError):
            self._failures[run.name] = str(feed.ended_by)
            self._surroundings.progress.say(f"{run.name}: {feed.ended_by}")
        run.log.say(
            f"{feed.ended_by or 'read'}: {self._status(run).line()}, {run.packer.reached.skipped:,} passed over"
        )

    @property
    def _size(self) -> int | None:
        return self._ledger.checkpoints.tokens_per_shard

    def _shards(self, run: _SourceRun) -> int:
        return self._ledger.checkpoints.sources[run.name].shards

    def _has_enough(self, run: _SourceRun) -> bool:
        waiting = run.packer.tokens // (self._size or self._most_shard_tokens)
        return self._shards(run) + waiting >= run.target_shards

    def _make_shards(self, run: _SourceRun) -> None:
        """Write the full shards; their size is not fixed until there is enough text for a whole data set."""
        size = self._most_shard_tokens
        if self._size is not None:
            self._write_shards(run, self._size)
        elif sum(min(other.target_shards, other.packer.tokens // size) for other in self._runs) >= MIN_SHARDS:
            self._settle(size)

    def _settle(self, size: int) -> None:
        self._ledger.open_writer(size)
        for run in self._runs:
            self._write_shards(run, size)

    def _write_shards(self, run: _SourceRun, size: int) -> None:
        while run.packer.tokens >= size and self._shards(run) < run.target_shards:
            self._ledger.add_shard(run.name, run.packer.cut(size))
            now = self._surroundings.clock()
            if now - self._published_at >= self._options.publish_seconds:
                self._ledger.publish()
                self._published_at = now

    def _status(self, run: _SourceRun) -> SourceProgress:
        return SourceProgress(
            source=run.name,
            shards=self._shards(run),
            target_shards=run.target_shards,
            tokens_per_shard=self._size or self._most_shard_tokens,
            tokens=run.tokens,
            text_bytes=run.text_bytes,
            documents=run.packer.reached.documents,
            seconds=run.seconds,
        )

    def _report(self, table: TokenizerTable) -> PopulationReport:
        now = self._ledger.checkpoints
        return PopulationReport(
            shards=now.total_shards,
            tokens=now.total_shards * (now.tokens_per_shard or 0),
            tokens_per_shard=now.tokens_per_shard or 0,
            vocabulary=table.next_merge_id,
            shards_by_source={name: source.shards for name, source in now.sources.items()},
            is_stopped=self._surroundings.stop.is_set(),
            failures=dict(self._failures),
        )


__all__ = [
    "PopulationDependencies",
    "PopulationOptions",
    "PopulationPlan",
    "PopulationReport",
    "populate",
    "stopped_error",
]
