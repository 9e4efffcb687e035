"""The manifest of a data set: strict parsing, signature, root, and the names and sizes of the files it describes.

Pure: bytes in, values out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from typing import cast

from neuroshard.data.shard_file import ShardForm, ShardFormat
from neuroshard.errors import DataError
from neuroshard.identity.signing import SignatureError, Signer, hash_parts, sign_json, verify_json
from neuroshard.identity.strict_json import canonical_json, parse_json
from neuroshard.types import JsonValue, ShardId

_MAX_LABEL = 200
_NOTHING: Mapping[str, JsonValue] = {}
_LOWER_HEX = re.compile(r"[0-9a-f]*")


class MalformedFieldError(ValueError):
    """A field that is missing, of the wrong type, out of range or unknown; the message names it."""


class Fields:
    """One JSON object with its place in the document; remembers which fields were read."""

    def __init__(self, value: JsonValue, place: str) -> None:
        if not isinstance(value, Mapping):
            raise MalformedFieldError(f"{place} is not an object")
        self._value = value
        self._place = place
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._value

    def integer(self, name: str, lowest: int, highest: int, default: int | None = None) -> int:
        """An integer within limits; booleans and floats are not integers."""
        if default is not None and not self.has(name):
            return default
        value = self._take(name)
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise MalformedFieldError(f"{self._place}.{name} must be an integer from {lowest} to {highest}")
        return value

    def label(self, name: str) -> str:
        """Return a short text; numbers become text, an absent field is empty (dates and versions vary in form)."""
        value = self._take(name) if self.has(name) else ""
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise MalformedFieldError(f"{self._place}.{name} must be text")
        text = str(value)
        if len(text) > _MAX_LABEL or not text.isprintable():
            raise MalformedFieldError(f"{self._place}.{name} must be printable text of at most {_MAX_LABEL} characters")
        return text

    def hexadecimal(self, name: str, byte_count: int) -> str:
        """Return lower-case hex digits of exactly `byte_count` bytes."""
        return self._hex(self._take(name), f"{self._place}.{name}", byte_count)

    def hexadecimals(self, name: str, byte_count: int, count: int) -> tuple[str, ...]:
        """Return a list of exactly `count` hex values of `byte_count` bytes each."""
        items = self.sequence(name, count, count)
        return tuple(self._hex(item, f"{self._place}.{name}[{i}]", byte_count) for i, item in enumerate(items))

    def mapping(self, name: str) -> Mapping[str, JsonValue]:
        """Return an object, empty when the field is absent."""
        value = self._take(name) if self.has(name) else _NOTHING
        if not isinstance(value, Mapping):
            raise MalformedFieldError(f"{self._place}.{name} must be an object")
        return value

    def sequence(self, name: str, shortest: int, longest: int) -> Sequence[JsonValue]:
        """Return a list whose length is within limits."""
        value = self._take(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or not shortest <= len(value) <= longest:
            wanted = str(shortest) if shortest == longest else f"{shortest} to {longest}"
            raise MalformedFieldError(f"{self._place}.{name} must be a list of {wanted} items")
        return value

    def skip(self, name: str) -> None:
        """Accept a field that is read elsewhere."""
        self._read.add(name)

    def refuse_unknown(self) -> None:
        """Raise MalformedFieldError when the object has fields that were not read."""
        unknown = sorted(self._value.keys() - self._read)
        if unknown:
            raise MalformedFieldError(f"{self._place} has the unknown field {unknown[0][:40]!r}")

    def _take(self, name: str) -> JsonValue:
        if name not in self._value:
            raise MalformedFieldError(f"{self._place}.{name} is missing")
        self._read.add(name)
        return self._value[name]

    @staticmethod
    def _hex(value: JsonValue, place: str, byte_count: int) -> str:
        if not isinstance(value, str) or len(value) != 2 * byte_count or not _LOWER_HEX.fullmatch(value):
            raise MalformedFieldError(f"{place} must be {2 * byte_count} lower-case hex digits")
        return value


MANIFEST_VERSIONS: Mapping[ShardFormat, int] = {"pt": 1, "bin": 2}  # `format_version`, by the form of the shards
PAGE_DIGESTS = 4096  # SHA-256 digests per page
MAX_MANIFEST_BYTES = 1024 * 1024
MAX_SHARD_TOKENS = 16_000_000  # at most 64 MB per `.bin` file
DEFAULT_SHARD_TOKENS = 2_500_000
MAX_SHARDS = 16_000_000
_MAX_TOKENIZERS = 4096
_MAX_COUNT = 2**63 - 1
_ROOT_DOMAIN = "neuroshard/genesis-root"
_UNVERIFIED_DOMAIN = "neuroshard/genesis-unverified"


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer table that made shard `first_shard` and those after it, up to the next entry."""

    next_merge_id: int
    sha256: str  # of tokenizer.json
    first_shard: int


@dataclass(frozen=True)
class SourceCount:
    """Documents and shards that one text source contributed to the data set."""

    shards: int = 0
    tokens: int = 0
    documents_processed: int = 0
    last_shard_id: int = -1


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
            "tokenizers": [dict(vars(entry)) for entry in self.tokenizers],
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
        "tokenizers": [dict(vars(entry)) for entry in manifest.tokenizers],
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
        manifest = _read_fields(value)
        canonical = canonical_json(value)  # refuses text that is not Unicode
    except ValueError as error:
        raise DataError(f"The Genesis manifest is malformed: {error}.") from error
    key = _checked_key(cast("Mapping[str, JsonValue]", value), trust)
    if key is None:
        if manifest.pages:
            return manifest
        return replace(manifest, minimal_root=hash_parts(_UNVERIFIED_DOMAIN, canonical).hex())
    if manifest.tokens_per_shard is None:
        raise DataError("The Genesis manifest is signed but names no digest pages, so no shard could be verified.")
    return replace(manifest, signing_key=key)


def _checked_key(value: Mapping[str, JsonValue], trust: ManifestTrust) -> str | None:
    """Return the hex key of a valid signature, None for a permitted unsigned manifest; otherwise raise DataError."""
    signature = value.get("signature")
    if signature is None:
        if trust.was_signed or trust.signing_key is not None:
            raise DataError(
                "The Genesis manifest is not signed, although this source was signed before.",
                "It may have been replaced. Ask the publisher of the data.",
            )
        return None
    try:
        fields = Fields(signature, "signature")
        key, hexadecimal = fields.hexadecimal("public_key", 32), fields.hexadecimal("value", 64)
        fields.refuse_unknown()
    except MalformedFieldError as error:
        raise DataError(f"The Genesis manifest is malformed: {error}.") from error
    if trust.signing_key is not None and key != trust.signing_key:
        raise DataError(f"The Genesis manifest is signed by {key[:16]}, this run trusts {trust.signing_key[:16]} only.")
    unsigned = {name: item for name, item in value.items() if name != "signature"}
    try:
        verify_json(bytes.fromhex(key), unsigned, hexadecimal)
    except SignatureError as error:
        raise DataError(f"The signature of the Genesis manifest is wrong: {error}") from error
    return key


def _read_fields(value: JsonValue) -> DataSetManifest:
    fields = Fields(value, "manifest")
    minimal = DataSetManifest(
        total_shards=fields.integer("total_shards", 1, MAX_SHARDS),
        total_tokens=fields.integer("total_tokens", 0, _MAX_COUNT, default=0),
        total_size_bytes=fields.integer("total_size_bytes", 0, _MAX_COUNT, default=0),
        tokenizer_version=fields.label("tokenizer_version"),
        sources=_read_sources(fields),
        created_at=fields.label("created_at"),
        updated_at=fields.label("updated_at"),
    )
    if not fields.has("format_version"):
        return minimal  # foreign keys are tolerated here: this form is older than ours
    full = replace(
        minimal,
        shard_format=read_shard_format(fields),
        tokens_per_shard=fields.integer("tokens_per_shard", 1, MAX_SHARD_TOKENS),
        tokenizers=_read_tokenizers(fields, minimal.total_shards),
        pages=_read_pages(fields, minimal.total_shards),
    )
    fields.skip("signature")
    fields.refuse_unknown()
    return full


def read_shard_format(fields: Fields) -> ShardFormat:
    """Return the form of the shards from the field `format_version`."""
    lowest, highest = min(MANIFEST_VERSIONS.values()), max(MANIFEST_VERSIONS.values())
    version = fields.integer("format_version", lowest, highest)
    return next(form for form, number in MANIFEST_VERSIONS.items() if number == version)


def _read_sources(fields: Fields) -> dict[str, SourceCount]:
    sources: dict[str, SourceCount] = {}
    for name, item in fields.mapping("sources").items():
        source = Fields(item, f"sources.{name[:40]}")
        sources[name] = SourceCount(
            shards=source.integer("shards", 0, MAX_SHARDS, default=0),
            tokens=source.integer("tokens", 0, _MAX_COUNT, default=0),
            documents_processed=source.integer("documents_processed", 0, _MAX_COUNT, default=0),
            last_shard_id=source.integer("last_shard_id", -1, MAX_SHARDS, default=-1),
        )
    return sources


def _read_tokenizers(fields: Fields, total_shards: int) -> tuple[TokenizerEntry, ...]:
    items = fields.sequence("tokenizers", 1, _MAX_TOKENIZERS)
    entries: list[TokenizerEntry] = []
    for position, item in enumerate(items):
        entry = Fields(item, f"tokenizers[{position}]")
        entries.append(
            TokenizerEntry(
                next_merge_id=entry.integer("next_merge_id", 266, 2**31),
                sha256=entry.hexadecimal("sha256", 32),
                first_shard=entry.integer("first_shard", 0, total_shards - 1),
            )
        )
        entry.refuse_unknown()
    starts = [entry.first_shard for entry in entries]
    if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise MalformedFieldError("tokenizers must begin at shard 0 and ascend")
    newest = Fields(fields.mapping("tokenizer"), "tokenizer")
    if (newest.hexadecimal("sha256", 32), newest.integer("next_merge_id", 266, 2**31)) != (
        entries[-1].sha256,
        entries[-1].next_merge_id,
    ):
        raise MalformedFieldError("tokenizer is not the last of tokenizers")
    newest.refuse_unknown()
    return tuple(entries)


def _read_pages(fields: Fields, total_shards: int) -> tuple[str, ...]:
    pages = Fields(fields.mapping("pages"), "pages")
    pages.integer("size", PAGE_DIGESTS, PAGE_DIGESTS)
    count = -(-total_shards // PAGE_DIGESTS)
    digests = pages.hexadecimals("sha256", 32, count)
    pages.refuse_unknown()
    return digests


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
