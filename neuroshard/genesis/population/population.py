"""The populator: sources in order of priority, through the tokeniser, into shards.

Every document is encoded with BOS before and EOS after it; the documents of a source stand one after another in the
order of the source, without padding, and are cut into shards of equal size. A shard has tokens of one source only; what
is left when a source ends waits until it grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from neuroshard.data.tokenizer import TokenizerTable
from neuroshard.errors import DataError
from neuroshard.genesis.destination import Destination
from neuroshard.genesis.packing import MIN_SHARDS, common_shard_tokens
from neuroshard.genesis.population.batches import text_batches
from neuroshard.genesis.population.encoding import EncodedBatch, EncodingPool
from neuroshard.genesis.population.feed import PAUSES_SECONDS, BuildStoppedError, PatientReader
from neuroshard.genesis.population.ledger import Ledger
from neuroshard.genesis.population.packer import Packer
from neuroshard.genesis.population.progress import ProgressPrinter, SourceStatus
from neuroshard.genesis.population.source_log import SourceLog
from neuroshard.genesis.population.vocabulary import grow_table, merge_shares, sample
from neuroshard.genesis.sources import PopulationConfiguration, SourceConfiguration, SourceFailureError, open_source
from neuroshard.genesis.sources.records import DocumentSource
from neuroshard.identity.signing import Signer


@dataclass(frozen=True)
class PopulationOptions:
    """How a population is run; none of it changes what comes out."""

    workers: int
    logs: Path
    publish_seconds: float = 30.0  # between two manifests while shards are made
    follow_seconds: float | None = None  # between two looks at sources that grow; None ends with the sources
    pauses_seconds: Sequence[float] = PAUSES_SECONDS


@dataclass(frozen=True)
class Surroundings:
    """What the populator is given of the world. `date` is ISO 8601, `clock` counts seconds and never goes back."""

    date: Callable[[], str]
    clock: Callable[[], float]
    stop: Event
    progress: ProgressPrinter


@dataclass(frozen=True)
class PopulationReport:
    """What is there at the end; `failures` says of each source that could not be read to its end why."""

    shards: int
    tokens: int
    vocabulary: int
    shards_by_source: dict[str, int]
    is_stopped: bool
    failures: dict[str, str]


def populate(
    configuration: PopulationConfiguration,
    destination: Destination,
    signer: Signer,
    options: PopulationOptions,
    surroundings: Surroundings,
) -> PopulationReport:
    """Make the data set, or go on with it where it was left.

    Raises DataError for sources that cannot be used, UsageError when a library is missing, StorageError and
    DiskFullError when the destination cannot be written, ConflictError when somebody else writes to it,
    BuildStoppedError when it was stopped before the first tokens.
    """
    with destination.claim("genesis build"), ExitStack() as open_logs:
        return _Population(configuration, destination, signer, options, surroundings, open_logs).run()


class _Source:
    """An active source with all that its run needs."""

    def __init__(self, configuration: SourceConfiguration, opened: DocumentSource, log: SourceLog) -> None:
        self.name = configuration.name
        self.target_shards = configuration.target_shards
        self.opened = opened
        self.log = log
        self.packer: Packer | None = None
        self.tokens = 0
        self.text_bytes = 0
        self.started: float | None = None


class _Population:
    def __init__(
        self,
        configuration: PopulationConfiguration,
        destination: Destination,
        signer: Signer,
        options: PopulationOptions,
        surroundings: Surroundings,
        open_logs: ExitStack,
    ) -> None:
        self._configuration = configuration
        self._options = options
        self._surroundings = surroundings
        self._stop = surroundings.stop
        self._active = configuration.active()
        self._ledger = Ledger(destination, signer, surroundings.date)
        self._ledger.take_sources(self._active)
        follows = options.follow_seconds is not None
        self._sources = [
            _Source(source, open_source(source, follows=follows), open_logs.enter_context(SourceLog(options.logs, source.name)))
            for source in self._active
        ]  # fmt: skip
        self._failures: dict[str, SourceFailureError] = {}
        self._published_at = surroundings.clock()

    def run(self) -> PopulationReport:
        table = self._learned(self._ledger.load_table())
        with EncodingPool(table, self._options.workers) as pool:
            while True:
                self._pass(pool)
                self._ledger.publish()
                wait = self._options.follow_seconds
                if wait is None or self._stop.wait(wait):
                    return self._report()

    def _learned(self, table: TokenizerTable | None) -> TokenizerTable:
        """The table, grown by what sources are to teach that were not asked before."""
        vocabulary, asked = self._configuration.vocabulary, self._ledger.asked_merges()
        if table is not None and self._ledger.checkpoints.tokens_per_shard is not None:
            self._open_writer(self._ledger.checkpoints.tokens_per_shard)
            self._ledger.publish()  # so that the manifest knows with which table its newest shards were made
        shares = merge_shares(self._active, vocabulary)
        wanted = {name: share - asked.get(name, 0) for name, share in shares.items()}
        by_name = {source.name: source for source in self._sources}

        def samples(name: str) -> list[str]:
            reader = self._reader(by_name[name], {})
            return list(sample(reader.records(), vocabulary.sample_documents))

        grown = grow_table(table, wanted, samples, vocabulary.merges, self._learning)
        self._ledger.take_table(grown, shares, self._active)
        return grown

    def _learning(self, source: str, fraction: float) -> None:
        if self._stop.is_set():
            raise BuildStoppedError
        self._surroundings.progress.learning(source, fraction)

    def _reader(self, source: _Source, position: object) -> PatientReader:
        return PatientReader(
            source.opened, position, log=source.log, stop=self._stop, pauses=self._options.pauses_seconds
        )

    def _pass(self, pool: EncodingPool) -> None:
        """Every source once, as far as it goes."""
        self._failures.clear()
        for source in self._sources:
            try:
                self._populate(source, pool)
            except SourceFailureError as error:
                source.log.say(f"given up for now: {error}")
                self._surroundings.progress.say(f"{source.name}: {error}")
                self._failures[source.name] = error
            if self._stop.is_set():
                return
        if self._ledger.checkpoints.tokens_per_shard is None:
            self._settle_small()
