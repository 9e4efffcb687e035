"""Builds a data set in a folder from text: collect, learn a vocabulary, tokenise into signed shards. All or nothing.

The documents (long ones in sections) are sorted by their hash and pass through the populator, which encodes each with
BOS before and EOS after it, joins them without padding, and cuts them into shards of equal size."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event

import numpy as np

from neuroshard.data.entropy import unigram_entropy
from neuroshard.data.manifest import CHECKPOINTS_NAME, DEFAULT_SHARD_TOKENS, MANIFEST_NAME, MAX_SHARDS, parse_manifest
from neuroshard.data.shard_file import ShardFormat, read_shard
from neuroshard.data.storage import storage_error, write_shared_file
from neuroshard.data.tokenizer import FIRST_MERGE_ID
from neuroshard.dataset.build_folder import (
    REPORT_NAME,
    BuildReport,
    has_default_run,
    read_report,
    refuse_foreign_files,
    replace_folder,
    unfinished_folder,
)
from neuroshard.dataset.build_text import StageProgress, TextSource, in_sections, shuffled, without_repeats
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.packing import default_merge_count, section_characters
from neuroshard.dataset.population import (
    PopulationDependencies,
    PopulationOptions,
    PopulationPlan,
    PopulationReport,
    populate,
)
from neuroshard.dataset.progress import SourceProgress
from neuroshard.dataset.records import ListedTexts, PopulationSource
from neuroshard.dataset.source_configuration import VocabularyConfiguration
from neuroshard.dataset.verification import verify_folder
from neuroshard.errors import DataError, UsageError
from neuroshard.identity.signing import Signer
from neuroshard.types import ShardId

BUILD_VERSION = "4"  # raise it when the same text would give another folder
MAX_BUILD_VOCABULARY = 32_000
READING, LEARNING, ENCODING = "Reading the text", "Learning the tokenizer", "Encoding the text"  # shown as progress


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build that the user may choose."""

    vocabulary: int | None = None  # ids in all, specials and bytes included; None: by the size of the text
    shard_format: ShardFormat = "bin"

    def __post_init__(self) -> None:
        if self.vocabulary is not None and not FIRST_MERGE_ID <= self.vocabulary <= MAX_BUILD_VOCABULARY:
            raise UsageError(
                f"A vocabulary of {self.vocabulary} token ids is not possible.",
                f"Give {FIRST_MERGE_ID} to {MAX_BUILD_VOCABULARY} with --vocabulary, or leave it out.",
            )


@dataclass(frozen=True)
class BuiltGenesis:
    """The built folder and its contents; `is_reused` when it existed already."""

    folder: Path
    report: BuildReport
    is_reused: bool
    has_default_run: bool  # published by `neuroshard run publish`, also before this build


def build_genesis(
    source: TextSource,
    folder: Path,
    signer: Signer,
    *,
    now: str,
    options: BuildOptions = BuildOptions(),
    progress: StageProgress = lambda _stage, _fraction: None,
) -> BuiltGenesis:
    """Build `folder`, or reuse it when the same text, options and key made it and nothing of it is damaged.

    `now` is an ISO 8601 date for the manifest. `progress` gets the names of the steps as a person reads them.

    The work happens in a folder next to it that replaces it at the end, so an interrupted build is never seen. Raises
    DataError when there is too little text, StorageError or DiskFullError when the folder cannot be written, or when
    something in it was not built here. The default run that was published there stays.
    """
    fingerprint = _fingerprint(source, options, signer)
    existing = read_report(folder)
    if existing is not None and existing.fingerprint == fingerprint and _is_sound(folder):
        return BuiltGenesis(folder, existing, is_reused=True, has_default_run=has_default_run(folder))
    try:
        refuse_foreign_files(folder, has_report=existing is not None)
    except OSError as error:
        raise storage_error(folder, error) from error
    corpus = _collect(source, progress)
    unfinished = unfinished_folder(folder)
    try:
        if unfinished.exists():
            shutil.rmtree(unfinished)  # an earlier build was interrupted
        populated = _populate(corpus, unfinished, signer, options, now=now, progress=progress)
        report = _report(corpus, populated, fingerprint, _entropy(unfinished))
        write_shared_file(unfinished / REPORT_NAME, report.to_json())
        replace_folder(unfinished, folder)
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # leave no partial files on a full disk
    return BuiltGenesis(folder, report, is_reused=False, has_default_run=has_default_run(folder))


@dataclass(frozen=True)
class _Corpus:
    """The text of a build."""

    source: str
    documents: int  # as found
    near_duplicates: int  # of them dropped
    text_bytes: int  # UTF-8, after dropping
    sections: tuple[str, ...]  # in the order of the shards


def _fingerprint(source: TextSource, options: BuildOptions, signer: Signer) -> str:
    parts = (BUILD_VERSION, source.name, source.fingerprint(), repr(options), signer.public_key.hex())
    return sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _is_sound(folder: Path) -> bool:
    try:
        return verify_folder(folder).is_sound
    except DataError:
        return False  # no manifest, or none that can be read: built again


def _collect(source: TextSource, progress: StageProgress) -> _Corpus:
    found = source.documents(lambda fraction: progress(READING, fraction))
    kept = without_repeats(found)
    text_bytes = sum(len(document.text.encode("utf-8", "surrogatepass")) for document in kept)
    sections = in_sections(kept, section_characters(sum(len(document.text) for document in kept)))
    texts = tuple(section.text for section in shuffled(list(sections)))
    return _Corpus(source.name, len(found), len(found) - len(kept), text_bytes, texts)


@dataclass(frozen=True)
class _BuildProgress:
    """A PopulationProgress that reports steps of the build. There is nothing to say: texts in memory do not fail."""

    show: StageProgress
    sections: int

    def learning(self, source: str, fraction: float) -> None:
        self.show(LEARNING, fraction)

    def tokenising(self, status: SourceProgress) -> None:
        self.show(ENCODING, status.documents / self.sections)

    def say(self, message: str) -> None:
        pass


def _populate(
    corpus: _Corpus, folder: Path, signer: Signer, options: BuildOptions, *, now: str, progress: StageProgress
) -> PopulationReport:
    wanted = options.vocabulary
    merges = default_merge_count(corpus.text_bytes) if wanted is None else wanted - FIRST_MERGE_ID
    plan = PopulationPlan(
        [PopulationSource(corpus.source, corpus.source, MAX_SHARDS, ListedTexts(corpus.sections))],
        VocabularyConfiguration(merges=merges, sample_documents=len(corpus.sections)),
        DEFAULT_SHARD_TOKENS,
    )
    shown = _BuildProgress(progress, len(corpus.sections))
    dependencies = PopulationDependencies(date=lambda: now, clock=time.monotonic, stop=Event(), progress=shown)
    settings = PopulationOptions(workers=0, logs=None, shard_format=options.shard_format)
    report = populate(plan, FolderDestination(folder), signer, settings, dependencies)
    (folder / CHECKPOINTS_NAME).unlink()  # a build is replaced as a whole, never continued
    return report


def _entropy(folder: Path) -> float:
    """Return the entropy of the token frequencies over all shards, in nats per token."""
    manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes())
    counts = np.zeros(manifest.tokenizers[-1].next_merge_id, dtype=np.int64)
    for form in map(manifest.shard_form, map(ShardId, range(manifest.total_shards))):
        counts += np.bincount(read_shard((folder / form.name).read_bytes(), form), minlength=len(counts))
    return unigram_entropy(counts)


def _report(corpus: _Corpus, populated: PopulationReport, fingerprint: str, entropy: float) -> BuildReport:
    return BuildReport(
        fingerprint=fingerprint,
        source=corpus.source,
        documents=corpus.documents,
        near_duplicates=corpus.near_duplicates,
        text_bytes=corpus.text_bytes,
        vocabulary=populated.vocabulary,
        tokens=populated.tokens,
        shards=populated.shards,
        tokens_per_shard=populated.tokens_per_shard,
        unigram_entropy=entropy,
    )
