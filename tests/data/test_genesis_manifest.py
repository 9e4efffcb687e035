"""manifest.json: both forms, signature, memory of a signed source, and everything that must be refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from neuroshard.data.manifest import MAX_MANIFEST_BYTES, ManifestTrust, parse_manifest, serialise_manifest, shard_of
from neuroshard.errors import DataError
from neuroshard.identity import sign_json
from tests.worlds.data_sets import TestSigner, write_genesis

MINIMAL = {
    "total_shards": 120,
    "total_tokens": 300_000_000,
    "total_size_bytes": 2_400_000_000,
    "tokenizer_version": 3,
    "sources": {"fineweb": {"shards": 120, "tokens": 300_000_000, "documents_processed": 9, "last_shard_id": 119}},
    "created_at": "2025-01-01T00:00:00",
    "updated_at": 1735689600.5,
    "something_else": [1, {"deep": None}],
}
KEY = TestSigner().public_key.hex()


@pytest.fixture
def signed(tmp_path: Path) -> bytes:
    write_genesis(tmp_path, signer=TestSigner())
    return (tmp_path / "manifest.json").read_bytes()


def resigned(data: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    """A manifest changed by somebody who holds the key."""
    value = json.loads(data)
    del value["signature"]
    change(value)
    value["signature"] = {"public_key": KEY, "value": sign_json(TestSigner(), value)}
    return json.dumps(value).encode()


def test_minimal_manifest_is_accepted_as_unverified() -> None:
    manifest = parse_manifest(json.dumps(MINIMAL).encode())
    assert not manifest.is_verifiable
    assert (manifest.total_shards, manifest.tokens_per_shard, manifest.pages) == (120, None, ())
    assert (manifest.tokenizer_version, manifest.updated_at) == ("3", "1735689600.5")
    assert manifest.sources["fineweb"].last_shard_id == 119
    changed = parse_manifest(json.dumps(MINIMAL | {"total_tokens": 1}).encode())
    assert len(manifest.root()) == 64
    assert manifest.root() != changed.root()


def test_signed_manifest_round_trip(signed: bytes) -> None:
    manifest = parse_manifest(signed, ManifestTrust(signing_key=KEY))
    assert manifest.signing_key == KEY
    assert manifest.is_verifiable
    assert parse_manifest(serialise_manifest(manifest, TestSigner())) == manifest
    assert manifest.shard_format == "bin"


def test_root_covers_the_form_of_shards_tokenizers_shard_size_and_pages(signed: bytes) -> None:
    manifest = parse_manifest(signed)
    roots = {
        manifest.root(),
        replace(manifest, total_shards=15).root(),
        replace(manifest, tokens_per_shard=401).root(),
        replace(manifest, shard_format="pt").root(),
        replace(manifest, tokenizers=()).root(),
        replace(manifest, pages=("00" * 32,)).root(),
    }
    assert len(roots) == 6


@pytest.mark.parametrize("trust", [ManifestTrust(was_signed=True), ManifestTrust(signing_key=KEY)])
def test_unsigned_manifest_is_refused_once_the_source_was_signed(tmp_path: Path, trust: ManifestTrust) -> None:
    write_genesis(tmp_path)
    for data in (json.dumps(MINIMAL).encode(), (tmp_path / "manifest.json").read_bytes()):
        parse_manifest(data)
        with pytest.raises(DataError, match="not signed"):
            parse_manifest(data, trust)


def test_another_key_is_refused(signed: bytes) -> None:
    with pytest.raises(DataError, match="trusts"):
        parse_manifest(signed, ManifestTrust(signing_key=TestSigner(2).public_key.hex()))


@pytest.mark.parametrize("field", ["total_shards", "tokens_per_shard", "updated_at", "tokenizers", "pages", "sources"])
def test_any_change_breaks_the_signature(signed: bytes, field: str) -> None:
    value = json.loads(signed)
    replacements = {"total_shards": 15, "tokens_per_shard": 399, "updated_at": "x", "sources": {"a": {}}}
    if field == "tokenizers":
        value["tokenizers"][0]["sha256"] = value["tokenizer"]["sha256"] = "00" * 32
    elif field == "pages":
        value["pages"]["sha256"][0] = "00" * 32
    else:
        value[field] = replacements[field]
    with pytest.raises(DataError, match="signature"):
        parse_manifest(json.dumps(value).encode())


def set_to(name: str, content: object) -> Callable[[dict[str, object]], None]:
    return lambda value: value.update({name: content})


@pytest.mark.parametrize(
    "change",
    [
        set_to("total_shards", 0),
        set_to("total_shards", 2**62),
        set_to("total_shards", "16"),
        set_to("total_shards", True),
        set_to("total_shards", 16.0),
        set_to("total_shards", 5000),  # needs two pages
        set_to("total_tokens", -1),
        set_to("tokens_per_shard", 0),
        set_to("tokens_per_shard", 10**12),
        set_to("format_version", 3),
        set_to("format_version", 0),
        set_to("pages", {"size": 1, "sha256": []}),
        set_to("pages", {"size": 4096, "sha256": ["0" * 63]}),
        set_to("pages", {"size": 4096, "sha256": ["G" * 64]}),
        set_to("pages", {"size": 4096, "sha256": ["00" * 32], "more": 1}),
        set_to("pages", []),
        set_to("tokenizers", []),
        set_to("tokenizers", [{"next_merge_id": 300, "sha256": "00" * 32, "first_shard": 1}]),
        set_to("tokenizers", [{"next_merge_id": 300, "sha256": "00" * 32, "first_shard": 0}] * 2),
        set_to("tokenizer", {"sha256": "00" * 32, "next_merge_id": 300}),
        set_to("sources", [1]),
        set_to("sources", {"a": 1}),
        set_to("created_at", ["x"]),
        set_to("created_at", "x" * 201),
        set_to("created_at", "\x1b[31m"),
        set_to("unknown", 1),
        lambda value: value.pop("tokenizers"),
    ],
)
def test_malformed_fields_are_refused_even_when_signed(
    signed: bytes, change: Callable[[dict[str, object]], None]
) -> None:
    with pytest.raises(DataError, match="malformed"):
        parse_manifest(resigned(signed, change))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'{"total_shards": NaN}',
        b'{"total_shards": 1, "total_shards": 2}',
        b'{"total_shards": 1' + b"0" * 5000 + b"}",
        b'{"total_shards": 3, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"total_shards": 3, "x": "\\ud800"}',
        b"\xff\xfe",
        b" " * (MAX_MANIFEST_BYTES + 1),
        b'{"total_shards": 3, "signature": 5}',
        b'{"total_shards": 3, "signature": {"public_key": "00", "value": "11"}}',
        b'{"total_tokens": 3}',
    ],
)
def test_anything_but_a_small_strict_object_is_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        parse_manifest(data)


def test_a_signed_manifest_without_pages_is_refused() -> None:
    value = {"total_shards": 3}
    value |= {"signature": {"public_key": KEY, "value": sign_json(TestSigner(), value)}}
    with pytest.raises(DataError, match="no digest pages"):
        parse_manifest(json.dumps(value).encode())


def test_manifest_of_600_000_shards_is_small(signed: bytes) -> None:
    pages = {"size": 4096, "sha256": ["ab" * 32] * 147}

    def grow(value: dict[str, object]) -> None:
        value.update(total_shards=600_000, pages=pages)

    data = resigned(signed, grow)
    assert len(data) < 12_000
    assert parse_manifest(data).page_entries(146) == 600_000 - 146 * 4096


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        ("shard_0.bin", 0),
        ("shard_17.pt", 17),
        ("shard_.bin", None),
        ("shard_1.bin.pt", None),
        ("shard_1.txt", None),
        ("../shard_1.bin", None),
        ("shard_1234567890.bin", None),
        ("shard_\u0661.bin", None),
        ("manifest.json", None),
    ],
)
def test_a_shard_is_known_by_the_name_of_its_file(name: str, shard: int | None) -> None:
    assert shard_of(name) == shard
