"""Verifies a published data set: signature, tokenizer tables, digest pages, counts, and the hash of each shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random

from neuroshard.data.manifest import (
    DIGEST_BYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MAX_PAGE_BYTES,
    PAGE_DIGESTS,
    TOKENIZER_NAME,
    DataSetManifest,
    ManifestTrust,
    TokenizerEntry,
    archived_tokenizer_name,
    checked_page,
    page_name,
    parse_manifest,
)
from neuroshard.data.shard_file import read_shard
from neuroshard.data.tokenizer.table import DEFAULT_MAX_FILE_BYTES, TokenizerTable
from neuroshard.dataset.build_text import Fraction
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.object_store import ObjectReader
from neuroshard.dataset.population_state import CHECKPOINTS_NAME, MAX_CHECKPOINTS_BYTES, parse_checkpoints
from neuroshard.errors import DataError, DataUnavailableError, StorageError
from neuroshard.types import ShardId


def table_problems(place: ObjectReader, manifest: DataSetManifest) -> Iterator[str]:
    """Check that every table exists, has its digest and size, and continues the one before it."""
    before: TokenizerTable | None = None
    for entry in manifest.tokenizers:
        try:
            table = _table(place, archived_tokenizer_name(entry.sha256), entry)
        except DataError as error:
            yield error.message
            continue
        if before is not None and table.merges[: len(before.merges)] != before.merges:
            yield f"The table of shard {entry.first_shard} and later does not continue the one before it."
        before = table
    try:
        _table(place, TOKENIZER_NAME, manifest.tokenizers[-1])
    except DataError as error:
        yield error.message


def _table(place: ObjectReader, name: str, entry: TokenizerEntry) -> TokenizerTable:
    there = place.read(name, DEFAULT_MAX_FILE_BYTES)
    if there is None:
        raise DataError(f"{name} is missing.")
    if sha256(there.content).hexdigest() != entry.sha256:
        raise DataError(f"{name} does not match its digest in the manifest.")
    table = TokenizerTable.load(there.content)
    if table.next_merge_id != entry.next_merge_id:
        raise DataError(f"{name} has {table.next_merge_id} ids, the manifest says {entry.next_merge_id}.")
    return table


def count_problems(manifest: DataSetManifest) -> Iterator[str]:
    """Check that the sums of the manifest agree."""
    tokens_per_shard, total = manifest.tokens_per_shard or 0, manifest.total_shards
    if manifest.total_tokens != total * tokens_per_shard:
        yield f"The manifest says {manifest.total_tokens} tokens, its {total} shards have {total * tokens_per_shard}."
    counts = manifest.sources
    if counts and sum(count.shards for count in counts.values()) != total:
        yield f"The sources of the manifest gave {sum(c.shards for c in counts.values())} shards, there are {total}."
    for name, count in counts.items():
        if count.tokens != count.shards * tokens_per_shard or count.last_shard_id >= total:
            yield f"The counts of source {name} contradict each other."


def stored_problems(place: ObjectReader, manifest: DataSetManifest) -> Iterator[str]:
    """Check that a populator's state, if present, is at least as new as the manifest."""
    there = place.read(CHECKPOINTS_NAME, MAX_CHECKPOINTS_BYTES)
    if there is None:
        return
    try:
        checkpoints = parse_checkpoints(there.content)
    except DataError as error:
        yield error.message
        return
    if checkpoints.total_shards < manifest.total_shards:
        yield (
            f"{CHECKPOINTS_NAME} describes {checkpoints.total_shards} shards, the manifest of {manifest.total_shards}: "
            "it is older, and a build cannot resume from it."
        )


MAX_PROBLEMS = 100


@dataclass(frozen=True)
class Verification:
    """The result of a check: at most 100 `problems` in words; `notes` are not errors."""

    total_shards: int
    shards_checked: int
    signed_by: str | None  # hex public key; None for an unsigned manifest
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether everything that was checked exists and is as the manifest says."""
        return not self.problems


@dataclass(frozen=True)
class VerificationSample:
    """A number of random shards to check instead of all."""

    shards: int
    rng: Random


def verify_folder(
    folder: Path, *, trust: ManifestTrust | None = None, progress: Fraction = lambda _: None
) -> Verification:
    """Hash every shard of a folder again. Raises DataError only when there is no readable manifest."""
    return verify_data_set(FolderDestination(folder), trust=trust or ManifestTrust(), progress=progress)


def verify_data_set(
    place: ObjectReader,
    *,
    trust: ManifestTrust,
    sample: VerificationSample | None = None,
    progress: Fraction = lambda _: None,
) -> Verification:
    """Check everything, or with a sample only some of the shards; one shard and one page are in memory.

    Raises DataError when there is no manifest that can be read and trusted, DataUnavailableError or StorageError when
    the place fails.
    """
    there = place.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    if there is None:
        raise DataError(f"{place.description} has no {MANIFEST_NAME}.", "Check the location.")
    manifest = parse_manifest(there.content, trust)
    if manifest.tokens_per_shard is None:
        problem = "The manifest is of the minimal form: it has no digests, so no shard can be verified."
        return Verification(manifest.total_shards, 0, manifest.signing_key, (problem,))
    return _Check(place, manifest, sample, progress).result()


class _Check:
    """One verification: collects problems until there are enough."""

    def __init__(
        self, place: ObjectReader, manifest: DataSetManifest, sample: VerificationSample | None, progress: Fraction
    ) -> None:
        self._place = place
        self._manifest = manifest
        self._progress = progress
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._checked = 0
        self._bytes = 0
        total = manifest.total_shards
        self._wanted: frozenset[int] | None = None
        if sample is not None and sample.shards < total:
            self._wanted = frozenset(sample.rng.sample(range(total), sample.shards))

    def result(self) -> Verification:
        """Check everything and return the result."""
        manifest = self._manifest
        self._problems += table_problems(self._place, manifest)
        self._problems += count_problems(manifest)
        self._problems += stored_problems(self._place, manifest)
        for page, digest in enumerate(manifest.pages):
            self._check_page(page, digest)
            if len(self._problems) >= MAX_PROBLEMS:
                break
        if self._checked == manifest.total_shards and not self._problems and self._bytes != manifest.total_size_bytes:
            self._problems.append(
                f"The shards have {self._bytes} bytes, the manifest says {manifest.total_size_bytes}."
            )
        problems = tuple(self._problems[:MAX_PROBLEMS])
        return Verification(manifest.total_shards, self._checked, manifest.signing_key, problems, tuple(self._notes))

    def _check_page(self, page: int, digest: str) -> None:
        """Check a page and its selected shards; the shards of a wrong page cannot be checked."""
        name, entries = page_name(page), self._manifest.page_entries(page)
        there = self._place.read(name, MAX_PAGE_BYTES)
        if there is None:
            self._problems.append(f"{name} is missing.")
            return
        surplus = len(there.content) // DIGEST_BYTES - entries
        if surplus < 0:
            self._problems.append(
                f"{name} has {len(there.content)} bytes, {entries} digests need {entries * DIGEST_BYTES}: "
                "it is cut off, or older than the manifest."
            )
            return
        try:
            data = checked_page(there.content, entries, digest, name)
        except DataError as error:
            self._problems.append(error.message)
            return
        if surplus:
            self._notes.append(
                f"{name} names {surplus} more shards than the manifest: "
                "the manifest is an old one, or more is being published."
            )
        digests = [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]
        first = page * PAGE_DIGESTS
        for index in range(len(digests)):
            if self._wanted is None or first + index in self._wanted:
                self._problems += self._shard_problems(ShardId(first + index), digests, first)
                self._checked += 1
                self._progress(self._checked / (len(self._wanted) if self._wanted else self._manifest.total_shards))
            if len(self._problems) >= MAX_PROBLEMS:
                return

    def _shard_problems(self, shard: ShardId, digests: list[bytes], first: int) -> Iterator[str]:
        name, (least, most) = self._manifest.shard_name(shard), self._manifest.shard_form(shard).size_limits
        try:
            there = self._place.read(name, most)
        except DataUnavailableError:
            raise
        except (DataError, StorageError) as error:  # too large, or only this file cannot be read
            yield error.message
            return
        if there is None:
            yield f"{name} is missing."
            return
        content = there.content
        self._bytes += len(content)
        digest = sha256(content).digest()
        if len(content) < least:
            yield f"{name} has {len(content)} bytes, expected at least {least}: it is cut off."
        elif digest != digests[shard - first]:
            yield f"{name} does not match its digest{self._mistaken_for(digest, digests, first)}."
        else:
            yield from self._token_problems(shard, content)

    def _token_problems(self, shard: ShardId, content: bytes) -> Iterator[str]:
        form = self._manifest.shard_form(shard)
        try:
            tokens = read_shard(content, form)
        except DataError as error:
            yield error.message
            return
        if int(tokens.max()) >= form.id_count:
            yield f"{form.name} has token ids outside 0..{form.id_count - 1}."

    def _mistaken_for(self, digest: bytes, digests: list[bytes], first: int) -> str:
        if digest not in digests:
            return ": it is damaged, or of another time than the manifest"
        return f": it is {self._manifest.shard_name(ShardId(first + digests.index(digest)))} under a wrong name"
