"""Opens the Genesis source of a run and the tokenizer table that the run pins."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import anyio

from neuroshard.config.folders import NodePaths
from neuroshard.config.run_parameters import GenesisPins
from neuroshard.data.data_set import Genesis, open_genesis, pinned_part
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, UNKNOWN_SOURCE, ManifestTrust, parse_manifest
from neuroshard.data.source import FolderSource, open_source
from neuroshard.data.storage import METADATA_FOLDER, MetadataStore, tokenizer_copy
from neuroshard.data.tokenizer import TokenizerTable
from neuroshard.data.tokenizer.table import DEFAULT_MAX_FILE_BYTES
from neuroshard.data.transfer import FileRequest
from neuroshard.errors import DataError, DataUnavailableError
from neuroshard.model.memory_limit import planned_bytes
from neuroshard.model.memory_need import MEGABYTE, PROCESS_BYTES
from neuroshard.network.tasks import accompanied
from neuroshard.runs.stored_runs import LocalRun, LocalRuns, find_run
from neuroshard.state.checkpoint_catalogue import SavedStage

_LOG = logging.getLogger(__name__)

OF_A_FOLDER = 1  # failures until a source is given up: a wrong file on a disk stays wrong
OF_A_SERVER = 5
PROBLEM_LOOK_SECONDS = 0.1
CHECK_SOURCE = "Check --genesis: it must name a Genesis folder or its address."
T = TypeVar("T")


@dataclass(frozen=True)
class OpenedData:
    """The data set, its table, and the run that was trained on it before, if any."""

    genesis: Genesis
    table: TokenizerTable  # restricted to the ids of `run`, if there is one
    run: LocalRun | None


def largest_tokenizer_bytes(tier_mb: int) -> int:
    """Largest tokenizer.json to accept, in bytes. Parsing one takes about 30 times its size in memory (measured)."""
    spare = tier_mb * MEGABYTE - planned_bytes(PROCESS_BYTES, tier_mb)
    return max(2 * MEGABYTE, spare // 40)


async def open_data(fetcher: Fetcher, store: Path, runs: LocalRuns, max_tokenizer_bytes: int) -> OpenedData:
    """Open the source, waiting until it answers. Raises DataError if its data cannot be used.

    A network source that fed a run before is opened from the copies kept for that run, so a restart does not need
    the network. A folder is read again, because its owner may have built other data in it.
    """
    with _naming(fetcher):
        return await _open(fetcher, store, runs, max_tokenizer_bytes)


async def open_joined_data(fetcher: Fetcher, store: Path, run: LocalRun, max_tokenizer_bytes: int) -> OpenedData:
    """Open exactly the data that a run pins, waiting for the source to answer. Raises DataError for other data."""
    with _naming(fetcher):
        return _of_run(await _opened(fetcher, store, max_tokenizer_bytes)(pins=run.parameters.genesis), run)


async def pins_of_source(
    location: str, store: Path, *, wanted: GenesisPins | None, max_tokenizer_bytes: int, seconds: float
) -> GenesisPins:
    """Pins of a run created now on this source. With `wanted`, check that the source has those pins and return them.

    Raises DataError if the data cannot be used, differ from `wanted`, or did not arrive within `seconds`.
    """
    source = open_source(location)
    fetcher = Fetcher(source)

    async def pins() -> GenesisPins:
        with _naming(fetcher):
            genesis = await _opened(fetcher, store, max_tokenizer_bytes)(pins=wanted)
            table = TokenizerTable.load(genesis.tokenizer)
            if wanted is not None and wanted.next_merge_id > table.next_merge_id:
                raise DataError(f"The tokenizer has {table.next_merge_id} ids, not {wanted.next_merge_id}.")
            return wanted or genesis.pins(table.next_merge_id)

    try:
        return await _in_time(fetcher, pins, seconds)
    finally:
        await source.aclose()


@contextmanager
def _naming(fetcher: Fetcher) -> Generator[None]:
    """Add the source's name, and what to do, to every DataError of the block."""
    try:
        yield
    except DataError as error:
        source = fetcher.source.description
        message = error.message if source in error.message else f"{source} cannot be used: {error.message}"
        raise DataError(message, error.action or CHECK_SOURCE) from error


def _opened(fetcher: Fetcher, store: Path, max_tokenizer_bytes: int) -> partial[Coroutine[Any, Any, Genesis]]:
    patience = OF_A_FOLDER if isinstance(fetcher.source, FolderSource) else OF_A_SERVER
    return partial(open_genesis, fetcher, store, max_tokenizer_bytes=max_tokenizer_bytes, give_up_after=patience)


async def _open(fetcher: Fetcher, store: Path, runs: LocalRuns, max_tokenizer_bytes: int) -> OpenedData:
    opened = _opened(fetcher, store, max_tokenizer_bytes)
    known = runs.of_source(fetcher.source.description)
    memory, run = known if known is not None else (None, None)
    if run is not None and not isinstance(fetcher.source, FolderSource):
        return _of_run(await opened(pins=run.parameters.genesis), run)
    trust = UNKNOWN_SOURCE
    if memory is not None and memory.signing_key is not None:
        trust = ManifestTrust(memory.signing_key, was_signed=True)
    genesis = await opened(trust=trust)
    table = TokenizerTable.load(genesis.tokenizer)
    found = runs.of_data(genesis.pins(table.next_merge_id))
    if found is not None:
        return _of_run(await opened(pins=found.parameters.genesis), found)
    if run is not None and await _continues(genesis, run.parameters.genesis):
        return _of_run(await opened(pins=run.parameters.genesis), run)  # the data set and its table grew
    if run is not None:
        text = "%s contains other data than before. A new run begins. The old one remains stored."
        _LOG.warning(text, fetcher.source.description)
    return OpenedData(genesis, table, None)


async def _continues(genesis: Genesis, pins: GenesisPins) -> bool:
    """Whether a data set begins with the data that a run pins."""
    try:
        await pinned_part(genesis.fetcher, genesis.store, genesis.manifest, pins, give_up_after=OF_A_FOLDER)
    except DataError:
        return False
    return True


def _of_run(genesis: Genesis, run: LocalRun) -> OpenedData:
    """Restrict the tokenizer to the run's ids, because the table may have grown since."""
    table = TokenizerTable.load(genesis.tokenizer)
    return OpenedData(genesis, table.restricted_to(run.parameters.genesis.next_merge_id), run)


async def look_at_source(location: str, seconds: float) -> str:
    """Describe a source in one phrase for `neuroshard doctor`. Raises DataError if it does not answer in time."""
    source = open_source(location)
    fetcher = Fetcher(source)

    async def looked() -> str:
        request = FileRequest(MANIFEST_NAME, 2, MAX_MANIFEST_BYTES, give_up_after=1)
        manifest = await fetcher.fetch_bytes(request, parse_manifest)
        signed = "signed" if manifest.signing_key else "unverified"
        return f"{manifest.total_shards:,} shards, {signed}, at {source.description}"

    try:
        return await _in_time(fetcher, looked, seconds)
    finally:
        await source.aclose()


async def _in_time(fetcher: Fetcher, work: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Return the value of `work`. Raises DataUnavailableError with the fetcher's last problem after `seconds`."""
    problem = ""

    async def note_problem() -> None:
        nonlocal problem
        while True:
            await anyio.sleep(PROBLEM_LOOK_SECONDS)
            problem = next((f": {item.error}" for item in fetcher.active() if item.error), problem)

    with anyio.move_on_after(seconds):
        return await accompanied(work, note_problem)
    raise DataUnavailableError(
        f"{fetcher.source.description} does not answer within {seconds:g} s{problem or '.'}",
        "Check --genesis and the internet connection.",
    )


def table_of(stages: Sequence[SavedStage], file: Path | None = None) -> TokenizerTable | None:
    """Tokenizer table of the run of these stages, without the ids for which the run's model has no rows.

    It is read from `file`, or without one from a copy in the data folders of the stages; None if they have no copy.
    Raises DataError if the file is not a table, not the one that the run pins, or has more ids than the model.
    """
    pins = next((pins for _, pins in _pinned(stages)), None)
    data = _given(file, pins) if file is not None else _kept(stages)
    if data is None:
        return None
    table = TokenizerTable.load(data)
    ids, rows = (table if pins is None else pins).next_merge_id, stages[0].architecture.vocabulary_size
    if ids > rows:
        raise DataError(f"The tokenizer has {ids:,} ids, the model {rows:,}.", "Name the run's own: --tokenizer FILE.")
    return table.restricted_to(ids)


def _given(file: Path, pins: GenesisPins | None) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(DEFAULT_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.", "Check the path.") from error
    if pins is not None and sha256(data).hexdigest() != pins.tokenizer_sha256:
        raise DataError(
            f"{file} is not the table that the run was made with ({pins.tokenizer_sha256[:16]}).",
            "Use tokenizer.json of its data set, or an older one from the folder tokenizers/ there.",
        )
    return data


def _kept(stages: Sequence[SavedStage]) -> bytes | None:
    for paths, pins in _pinned(stages):
        digest = pins.tokenizer_sha256
        data = MetadataStore(paths.data_cache / METADATA_FOLDER).read(tokenizer_copy(digest), digest)
        if data is not None:
            return data
    return None


def _pinned(stages: Sequence[SavedStage]) -> Iterator[tuple[NodePaths, GenesisPins]]:
    """The data folders of these stages in which the run is stored, each with the run's pins."""
    for folder in dict.fromkeys(Path(stage.generation.path).parents[4] for stage in stages):
        run = find_run(folder, stages[0].run_id)
        if run is not None:
            yield NodePaths.below(folder), run.parameters.genesis
