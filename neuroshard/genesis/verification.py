"""Checks a whole Genesis folder on disk: signature, tokenizer, digest pages and every shard, hashed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from neuroshard.data.genesis.layout import (
    DIGEST_BYTES,
    MANIFEST_NAME,
    MAX_PAGE_BYTES,
    TOKENIZER_NAME,
    archived_tokenizer_name,
    checked_page,
    page_name,
    shard_name,
)
from neuroshard.data.genesis.manifest import (
    MAX_MANIFEST_BYTES,
    PAGE_DIGESTS,
    Manifest,
    ManifestTrust,
    TokenizerEntry,
    parse_manifest,
)
from neuroshard.data.genesis.torch_file import inspect_shard
from neuroshard.data.tokenizer.table import DEFAULT_MAX_FILE_BYTES, TokenizerTable
from neuroshard.errors import DataError
from neuroshard.genesis.documents import Fraction
from neuroshard.types import ShardId

_CHUNK_BYTES = 1 << 20
MAX_PROBLEMS = 100


@dataclass(frozen=True)
class FolderVerification:
    """What a check of a folder found; `problems` says in words what is wrong, at most 100 of them."""

    total_shards: int
    shards_checked: int
    signed_by: str | None  # hex public key; None for an unsigned manifest
    problems: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether everything the manifest names is there and as it says."""
        return not self.problems


def verify_folder(
    folder: Path, *, trust: ManifestTrust | None = None, progress: Fraction = lambda _: None
) -> FolderVerification:
    """Hash every shard again and compare. Raises DataError only when there is no readable manifest at all."""
    manifest = parse_manifest(_read(folder, MANIFEST_NAME, MAX_MANIFEST_BYTES), trust or ManifestTrust())
    if manifest.tokens_per_shard is None:
        problem = "The manifest is of the minimal form: it has no digests, so no shard can be verified."
        return FolderVerification(manifest.total_shards, 0, manifest.signing_key, (problem,))
    problems = list(_tokenizer_problems(folder, manifest))
    checked = 0
    for shard, digest in _digests(folder, manifest, problems):
        problems += _shard_problems(folder, manifest, shard, digest)
        checked += 1
        progress(checked / manifest.total_shards)
        if len(problems) >= MAX_PROBLEMS:
            break
    return FolderVerification(manifest.total_shards, checked, manifest.signing_key, tuple(problems[:MAX_PROBLEMS]))


def _read(folder: Path, name: str, limit: int) -> bytes:
    try:
        with (folder / name).open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{folder / name} cannot be read: {error.strerror or error}.") from error
    if len(data) > limit:
        raise DataError(f"{folder / name} is larger than {limit} bytes.")
    return data


def _tokenizer_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    newest = manifest.tokenizers[-1]
    files = [(TOKENIZER_NAME, newest)]
    files += [(archived_tokenizer_name(entry.sha256), entry) for entry in manifest.tokenizers[:-1]]
    for name, entry in files:
        try:
            _check_tokenizer(_read(folder, name, DEFAULT_MAX_FILE_BYTES), name, entry)
        except DataError as error:
            yield error.message


def _check_tokenizer(data: bytes, name: str, entry: TokenizerEntry) -> None:
    if sha256(data).hexdigest() != entry.sha256:
        raise DataError(f"{name} does not match its digest in the manifest.")
    table = TokenizerTable.load(data)
    if table.next_merge_id != entry.next_merge_id:
        raise DataError(f"{name} has {table.next_merge_id} ids, the manifest says {entry.next_merge_id}.")


def _digests(folder: Path, manifest: Manifest, problems: list[str]) -> Iterator[tuple[ShardId, bytes]]:
    """Every shard with its digest; a wrong page is noted as a problem and its shards are left out."""
    for page, page_hash in enumerate(manifest.pages):
        name = page_name(page)
        try:
            data = checked_page(_read(folder, name, MAX_PAGE_BYTES), manifest.page_entries(page), page_hash, name)
        except DataError as error:
            problems.append(error.message)
            continue
        for index in range(len(data) // DIGEST_BYTES):
            yield ShardId(page * PAGE_DIGESTS + index), data[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def _shard_problems(folder: Path, manifest: Manifest, shard: ShardId, digest: bytes) -> Iterator[str]:
    name = shard_name(shard)
    tokens = manifest.tokens_per_shard or 0
    try:
        if _file_digest(folder / name) != digest:
            yield f"{name} does not match its digest."
            return
        ids = inspect_shard(folder / name, max_tokens=tokens, exact_tokens=tokens).map()
    except OSError as error:
        yield f"{name} cannot be read: {error.strerror or error}."
    except DataError as error:
        yield error.message
    else:
        newest = manifest.tokenizers[-1].next_merge_id
        if int(np.min(ids)) < 0 or int(np.max(ids)) >= newest:
            yield f"{name} has token ids outside 0..{newest - 1}."


def _file_digest(path: Path) -> bytes:
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()
