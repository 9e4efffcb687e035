"""The manifest of a data set: strict parsing, signature, root, and the names and sizes of the files it describes.

Pure: bytes in, values out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta, Struct, structs

from neuroshard.data.shard_file import ShardForm, ShardFormat
from neuroshard.decoders import analysed, fault_of
from neuroshard.errors import DataError
from neuroshard.identity.signing import SignatureError, Signer, hash_parts, sign_json, verify_json
from neuroshard.identity.strict_json import canonical_json, parse_json
from neuroshard.types import HexDigest, HexKey, HexSignature, JsonValue, ShardId

MANIFEST_VERSIONS: Mapping[ShardFormat, Literal[1, 2]] = {
    "pt": 1,
    "bin": 2,
}  # `format_version`, by the form of the shards
SHARD_FORMATS: Mapping[int, ShardFormat] = {number: form for form, number in MANIFEST_VERSIONS.items()}
PAGE_DIGESTS = 4096  # SHA-256 digests per page
MAX_MANIFEST_BYTES = 1024 * 1024
MAX_SHARD_TOKENS = 16_000_000  # at most 64 MB per `.bin` file
DEFAULT_SHARD_TOKENS = 2_500_000
MAX_SHARDS = 16_000_000
_ROOT_DOMAIN = "neuroshard/genesis-root"
_UNVERIFIED_DOMAIN = "neuroshard/genesis-unverified"


Label: TypeAlias = Annotated[str, Meta(max_length=200)] | int | float  # dates and versions vary in form
StoredCount: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ShardNumber: TypeAlias = Annotated[int, Meta(ge=-1, le=MAX_SHARDS)]  # -1: no shard yet
ShardCount: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SHARDS)]
ShardTokens: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SHARD_TOKENS)]


def label_text(label: Label) -> str:
    """Return a label as text. Raises ValueError if it is not printable."""
    text = str(label)
    if not text.isprintable():
        raise ValueError("a label is not printable text")
    return text


class TokenizerTableName(Struct, frozen=True, forbid_unknown_fields=True):
    """A tokenizer table in a file."""

    next_merge_id: Annotated[int, Meta(ge=266, le=2**31)]
    sha256: HexDigest  # of tokenizer.json


class TokenizerEntry(TokenizerTableName, frozen=True):
    """The tokenizer table that made shard `first_shard` and those after it, up to the next entry."""

    first_shard: ShardCount


@dataclass(frozen=True)
class SourceCount:
    """Documents and shards that one text source contributed to the data set."""

    shards: ShardCount = 0
    tokens: StoredCount = 0
    documents_processed: StoredCount = 0
    last_shard_id: ShardNumber = -1


class ManifestSignature(Struct, frozen=True, forbid_unknown_fields=True):
    """The signature in a manifest: over the canonical JSON of the other fields."""

    public_key: HexKey
    value: HexSignature


class MinimalManifest(Struct, frozen=True, kw_only=True):
    """The minimal form of manifest.json. It is older than ours, so it may have fields of others."""

    total_shards: Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
    total_tokens: StoredCount = 0
    total_size_bytes: StoredCount = 0
    tokenizer_version: Label = ""
    sources: dict[str, SourceCount] = {}
    created_at: Label = ""
    updated_at: Label = ""
    signature: ManifestSignature | None = None

    def manifest(self) -> DataSetManifest:
        """The contents. Raises ValueError for text that is not printable."""
        return DataSetManifest(
            self.total_shards,
            self.total_tokens,
            self.total_size_bytes,
            label_text(self.tokenizer_version),
            self.sources,
            label_text(self.created_at),
            label_text(self.updated_at),
        )


class DigestPages(Struct, frozen=True, forbid_unknown_fields=True):
    """The digest pages of a data set."""

    size: Literal[4096]  # PAGE_DIGESTS
    sha256: tuple[HexDigest, ...]


class FullManifest(MinimalManifest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The full form of manifest.json."""

    format_version: Literal[1, 2]  # MANIFEST_VERSIONS
    tokens_per_shard: ShardTokens
    tokenizer: TokenizerTableName  # the newest
    tokenizers: Annotated[tuple[TokenizerEntry, ...], Meta(min_length=1, max_length=4096)]
    pages: DigestPages

    def __post_init__(self) -> None:
        """Raise ValueError for fields that contradict each other."""
        starts = [entry.first_shard for entry in self.tokenizers]
        if starts[0] != 0 or starts[-1] >= self.total_shards or any(a >= b for a, b in pairwise(starts)):
            raise ValueError("tokenizers must begin at shard 0 and ascend")
        newest = self.tokenizers[-1]
        if self.tokenizer != TokenizerTableName(newest.next_merge_id, newest.sha256):
            raise ValueError("tokenizer is not the last of tokenizers")
        if len(self.pages.sha256) != (count := -(-self.total_shards // PAGE_DIGESTS)):
            raise ValueError(f"pages.sha256 must be a list of {count} items")

    def manifest(self) -> DataSetManifest:
        """The contents. Raises ValueError for text that is not printable."""
        return replace(
            super().manifest(),
            shard_format=SHARD_FORMATS[self.format_version],
            tokens_per_shard=self.tokens_per_shard,
            tokenizers=self.tokenizers,
            pages=self.pages.sha256,
        )


@dataclass(frozen=True)
class DataSetManifest:
    """Contents of manifest.json. Without `pages` it is the minimal form, whose shards cannot be verified."""

    total_shards: int
    total_tokens: int = 0
    total_size_bytes: int = 0
    tokenizer_version: str = ""
    sources: Mapping[str, SourceCount] = field(default_factory=dict[str, SourceCount])
    created_at: str = ""
    updated_at: str = ""
    tokens_per_shard: int | None = None
    shard_format: ShardFormat = "pt"  # the default is that of the minimal form
    tokenizers: tuple[TokenizerEntry, ...] = ()
    pages: tuple[str, ...] = ()  # SHA-256 of each digest page, hex
    signing_key: str | None = None  # hex, once its signature was checked
    minimal_root: str = ""

    @property
    def is_verifiable(self) -> bool:
        """Whether shards can be checked against signed digests."""
        return self.signing_key is not None

    def root(self) -> str:
        """The hex value that a run pins: a hash over tokenizers, shard size, number of shards and digest pages."""
        return self.minimal_root or genesis_root(self)

    def page_entries(self, page: int, total_shards: int | None = None) -> int:
        """Return the number of digests in a page for the first `total_shards` shards (default: all)."""
        total = self.total_shards if total_shards is None else total_shards
        return max(0, min(PAGE_DIGESTS, total - page * PAGE_DIGESTS))

    def tokenizers_before(self, total_shards: int) -> tuple[TokenizerEntry, ...]:
        """Return the tables in use when the data set had `total_shards` shards."""
        return tuple(entry for entry in self.tokenizers if entry.first_shard < total_shards)

    def tokenizer_of(self, shard: int) -> TokenizerEntry | None:
        """Return the table that made a shard, or None when the manifest names no tables."""
        return next((entry for entry in reversed(self.tokenizers) if entry.first_shard <= shard), None)

    def shard_name(self, shard: ShardId) -> str:
        return f"shard_{shard}.{self.shard_format}"

    def shard_form(self, shard: ShardId) -> ShardForm:
        """Return the form of a shard's file, for a data set that lists its tokenizer tables."""
        tokens, table = self.tokens_per_shard, self.tokenizer_of(shard)
        if tokens is None or table is None:
            raise ValueError("the minimal form of a manifest does not describe its shards")
        return ShardForm(
            self.shard_name(shard), self.shard_format, tokens, table.next_merge_id, tokens, has_digest=True
        )

    def to_json(self) -> dict[str, JsonValue]:
        """The manifest without a signature."""
        value: dict[str, JsonValue] = {
            "total_shards": self.total_shards,
            "total_tokens": self.total_tokens,
            "total_size_bytes": self.total_size_bytes,
            "tokenizer_version": self.tokenizer_version,
            "sources": {name: dict(vars(count)) for name, count in self.sources.items()},
            "created_at": self.created_at,
            "updated_at": self.updated_at,
        }
        if self.tokens_per_shard is None:
            return value
        newest = self.tokenizers[-1]
        return value | {
            "format_version": MANIFEST_VERSIONS[self.shard_format],
            "tokens_per_shard": self.tokens_per_shard,
            "tokenizer": {"sha256": newest.sha256, "next_merge_id": newest.next_merge_id},
            "tokenizers": [structs.asdict(entry) for entry in self.tokenizers],
            "pages": {"size": PAGE_DIGESTS, "sha256": list(self.pages)},
        }


@dataclass(frozen=True)
class ManifestTrust:
    """The facts that this node remembers about a source: the key a run pins, and whether it was ever signed."""

    signing_key: str | None = None  # hex; only this key is accepted
    was_signed: bool = False  # then an unsigned manifest is refused


UNKNOWN_SOURCE = ManifestTrust()  # no memory of the source: a signature is trusted on first use


def genesis_root(manifest: DataSetManifest) -> str:
    """Return the hex SHA-256 of "neuroshard/genesis-root" and the canonical JSON of the fields that describe shards."""
    value: dict[str, JsonValue] = {
        "format_version": MANIFEST_VERSIONS[manifest.shard_format],
        "total_shards": manifest.total_shards,
        "tokens_per_shard": manifest.tokens_per_shard,
        "tokenizers": [structs.asdict(entry) for entry in manifest.tokenizers],
        "pages": list(manifest.pages),
    }
    return hash_parts(_ROOT_DOMAIN, canonical_json(value)).hex()


def serialise_manifest(manifest: DataSetManifest, signer: Signer | None) -> bytes:
    """manifest.json; with a signer it carries an Ed25519 signature over the canonical JSON without `signature`."""
    value = manifest.to_json()
    if signer is not None:
        signature = {"public_key": signer.public_key.hex(), "value": sign_json(signer, value)}
        value |= {"signature": signature}
    return json.dumps(value, indent=1, sort_keys=True).encode()


def parse_manifest(data: bytes, trust: ManifestTrust = UNKNOWN_SOURCE) -> DataSetManifest:
    """Read a manifest of either form.

    Raises DataError when it is too large, not strict JSON, has a field of the wrong type or range, contradicts itself,
    carries a wrong signature or another key than the trusted one, or is unsigned although the source was signed once.
    """
    try:
        value = parse_json(data, MAX_MANIFEST_BYTES)
        form: type[MinimalManifest] = MinimalManifest
        if isinstance(value, Mapping) and "format_version" in value:
            form = FullManifest
        file = _converted(value, form)
        manifest = file.manifest()
        canonical = canonical_json(value)  # refuses text that is not Unicode
    except ValueError as error:
        raise DataError(f"The Genesis manifest is malformed: {error}.") from error
    key = _checked_key(cast("Mapping[str, JsonValue]", value), file.signature, trust)
    if key is None:
        if manifest.pages:
            return manifest
        return replace(manifest, minimal_root=hash_parts(_UNVERIFIED_DOMAIN, canonical).hex())
    if manifest.tokens_per_shard is None:
        raise DataError("The Genesis manifest is signed but names no digest pages, so no shard could be verified.")
    return replace(manifest, signing_key=key)


def _converted(value: JsonValue, form: type[MinimalManifest]) -> MinimalManifest:
    try:
        return msgspec.convert(value, analysed(form))
    except ValueError as error:
        raise ValueError(fault_of(error, form)) from None


def _checked_key(
    value: Mapping[str, JsonValue], signature: ManifestSignature | None, trust: ManifestTrust
) -> str | None:
    """Return the hex key of a valid signature, None for a permitted unsigned manifest; otherwise raise DataError."""
    if signature is None:
        if trust.was_signed or trust.signing_key is not None:
            raise DataError(
                "The Genesis manifest is not signed, although this source was signed before.",
                "It may have been replaced. Ask the publisher of the data.",
            )
        return None
    key = signature.public_key
    if trust.signing_key is not None and key != trust.signing_key:
        raise DataError(f"The Genesis manifest is signed by {key[:16]}, this run trusts {trust.signing_key[:16]} only.")
    unsigned = {name: item for name, item in value.items() if name != "signature"}
    try:
        verify_json(bytes.fromhex(key), unsigned, signature.value)
    except SignatureError as error:
        raise DataError(f"The signature of the Genesis manifest is wrong: {error}") from error
    return key


MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
CHECKPOINTS_NAME = "checkpoints.json"  # written by a populator
DIGEST_BYTES = 32
MAX_PAGE_BYTES = PAGE_DIGESTS * DIGEST_BYTES
_SHARD_NAME = re.compile(r"shard_([0-9]{1,9})\.(?:bin|pt)", re.ASCII)


def shard_of(name: str) -> ShardId | None:
    """Return the shard whose file has this name, or None for other files; inverts `DataSetManifest.shard_name`."""
    found = _SHARD_NAME.fullmatch(name)
    return None if found is None else ShardId(int(found[1]))


def page_name(page: int) -> str:
    """Return the name of the file with the digests of shards page * 4096 and following."""
    return f"pages/{page:05d}.bin"


def archived_tokenizer_name(digest: str) -> str:
    """Return the name that a table keeps after the data set's tokenizer grew, for runs that pinned it."""
    return f"tokenizers/{digest}.json"


def checked_page(data: bytes, entries: int, digest: str, name: str) -> bytes:
    """Return the first `entries` digests of a page, without digests that were added later.

    Raises DataError when the page is too short or too long, or when those digests do not hash to `digest`.
    """
    wanted = entries * DIGEST_BYTES
    if not wanted <= len(data) <= MAX_PAGE_BYTES or len(data) % DIGEST_BYTES:
        raise DataError(f"{name} has {len(data)} bytes, expected at least {wanted} and at most {MAX_PAGE_BYTES}.")
    prefix = data[:wanted]
    if sha256(prefix).hexdigest() != digest:
        raise DataError(f"{name} does not match its digest in the signed manifest.")
    return prefix


def page_digest(data: bytes) -> str:
    """SHA-256 of a page, as the manifest names it."""
    return sha256(data).hexdigest()
