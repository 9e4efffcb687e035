"""The tokenizer table that belongs to saved states: which one their run pins, and the copy a node of it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from neuroshard.config.folders import NodePaths
from neuroshard.config.run_parameters import GenesisPins
from neuroshard.data.storage import METADATA_FOLDER, MetadataStore, tokenizer_copy
from neuroshard.data.tokenizer.table import DEFAULT_MAX_FILE_BYTES, TokenizerTable
from neuroshard.errors import DataError
from neuroshard.node.own_run import find_run
from neuroshard.state.checkpoint_catalogue import SavedStage


def table_of(stages: Sequence[SavedStage], file: Path | None = None) -> TokenizerTable | None:
    """The table of the run of these stages, without the ids that the run has no rows for.

    From `file`, else from a copy in the data folders that hold the stages; None when they have none. Raises DataError
    when the file is not the table that the run pins, or not a table, or one with more ids than the model.
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
            "Take tokenizer.json of its data set, or of an older one from the folder tokenizers/ there.",
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
    """What each data folder of these stages says of the run's data, as far as it knows the run."""
    for folder in dict.fromkeys(Path(stage.generation.path).parents[4] for stage in stages):
        run = find_run(folder, stages[0].run_id)
        if run is not None:
            yield NodePaths.below(folder), run.parameters.genesis
