"""Builds a data set in a folder from text: collect, learn a vocabulary, tokenise, pack, sign. All or nothing.

Each document (a long one in sections) is encoded with BOS before and EOS after it. The documents are sorted by their
hash, concatenated without padding, and cut into shards of equal size."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neuroshard.data.entropy import unigram_entropy
from neuroshard.data.manifest import SourceCount
from neuroshard.data.shard_file import ShardFormat
from neuroshard.data.storage import storage_error, write_shared_file
from neuroshard.data.tokenizer import FIRST_MERGE_ID, Tokenizer, TokenizerTable, count_words, learn_from_counts
from neuroshard.dataset.build_folder import (
    REPORT_NAME,
    BuildReport,
    has_default_run,
    read_report,
    refuse_foreign_files,
    replace_folder,
    unfinished_folder,
)
from neuroshard.dataset.build_text import Document, StageProgress, TextSource, in_sections, shuffled, without_repeats
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.packing import (
    DEFAULT_MAX_SHARD_TOKENS,
    MIN_SHARD_TOKENS,
    ShardPlan,
    cut_shards,
    default_merge_count,
    plan_shards,
    section_characters,
)
from neuroshard.dataset.verification import verify_folder
from neuroshard.dataset.writer import GenesisWriter
from neuroshard.errors import DataError, UsageError
from neuroshard.identity.signing import Signer

BUILD_VERSION = "3"  # raise it when the same text would give another folder
MAX_BUILD_VOCABULARY = 32_000
STAGES = ("collect", "learn", "tokenise", "write")


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build that the user may choose."""

    vocabulary: int | None = None  # ids in all, specials and bytes included; None: by the size of the text
    max_shard_tokens: int = DEFAULT_MAX_SHARD_TOKENS
    min_shard_tokens: int = MIN_SHARD_TOKENS
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

    `now` is an ISO 8601 date for the manifest.

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
    prepared = _prepare(source, options, progress)
    unfinished = unfinished_folder(folder)
    try:
        if unfinished.exists():
            shutil.rmtree(unfinished)  # an earlier build was interrupted
        unfinished.mkdir(parents=True)
        report = _write(prepared, unfinished, signer, options.shard_format, fingerprint, now=now, progress=progress)
        replace_folder(unfinished, folder)
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # leave no partial files on a full disk
    return BuiltGenesis(folder, report, is_reused=False, has_default_run=has_default_run(folder))


@dataclass(frozen=True)
class _Prepared:
    """Everything about a folder that is computed before the first write."""

    source: str
    documents: int
    near_duplicates: int
    text_bytes: int
    table: TokenizerTable
    ids: NDArray[np.uint32]  # (tokens,)
    plan: ShardPlan


def _fingerprint(source: TextSource, options: BuildOptions, signer: Signer) -> str:
    parts = (BUILD_VERSION, source.name, source.fingerprint(), repr(options), signer.public_key.hex())
    return sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _is_sound(folder: Path) -> bool:
    try:
        return verify_folder(folder).is_sound
    except DataError:
        return False  # no manifest, or none that can be read: built again


def _prepare(source: TextSource, options: BuildOptions, progress: StageProgress) -> _Prepared:
    found = source.documents(lambda fraction: progress("collect", fraction))
    kept = without_repeats(found)
    text_bytes = sum(len(document.text.encode("utf-8", "surrogatepass")) for document in kept)
    sections = shuffled(list(in_sections(kept, section_characters(sum(len(document.text) for document in kept)))))
    merge_count = default_merge_count(text_bytes) if options.vocabulary is None else options.vocabulary - FIRST_MERGE_ID
    progress("learn", 0.0)
    words = count_words(section.text for section in sections)
    table = learn_from_counts(
        words, merge_count, source=source.name, progress=lambda fraction: progress("learn", fraction)
    )
    ids = _tokenise(Tokenizer(table), sections, progress)
    plan = plan_shards(len(ids), options.max_shard_tokens, options.min_shard_tokens)
    return _Prepared(source.name, len(found), len(found) - len(kept), text_bytes, table, ids, plan)


def _tokenise(tokenizer: Tokenizer, sections: Sequence[Document], progress: StageProgress) -> NDArray[np.uint32]:
    pieces: list[NDArray[np.uint32]] = []
    for done, ids in enumerate(tokenizer.encode_documents(section.text for section in sections)):
        pieces.append(ids)
        progress("tokenise", (done + 1) / len(sections))
    return np.concatenate(pieces)


def _write(
    prepared: _Prepared,
    folder: Path,
    signer: Signer,
    shard_format: ShardFormat,
    fingerprint: str,
    *,
    now: str,
    progress: StageProgress,
) -> BuildReport:
    plan, table = prepared.plan, prepared.table
    writer = GenesisWriter(FolderDestination(folder), tokens_per_shard=plan.tokens_per_shard, shard_format=shard_format)
    counts = np.zeros(table.next_merge_id, dtype=np.int64)
    for done, ids in enumerate(cut_shards(prepared.ids, plan)):
        writer.add_shard(ids)
        counts += np.bincount(ids, minlength=table.next_merge_id)
        progress("write", (done + 1) / plan.shard_count)
    tokens = plan.shard_count * plan.tokens_per_shard
    writer.finish(
        signer,
        tokenizer=table.to_json(),
        next_merge_id=table.next_merge_id,
        now=now,
        sources={prepared.source: SourceCount(plan.shard_count, tokens, prepared.documents, plan.shard_count - 1)},
    )
    report = BuildReport(
        fingerprint=fingerprint,
        source=prepared.source,
        documents=prepared.documents,
        near_duplicates=prepared.near_duplicates,
        text_bytes=prepared.text_bytes,
        vocabulary=table.next_merge_id,
        tokens=tokens,
        shards=plan.shard_count,
        tokens_per_shard=plan.tokens_per_shard,
        unigram_entropy=unigram_entropy(counts),
    )
    write_shared_file(folder / REPORT_NAME, report.to_json())
    return report
