"""A sealed identity: what went in comes out with the passphrase, and with nothing else."""

from __future__ import annotations

import json

import pytest

from neuroshard.errors import StorageError, TokenError
from neuroshard.identity import Wallet, parse_token
from neuroshard.identity.backup import Identity, seal, unseal

PHRASE = "legal winner thank year wave sausage worth useful legal winner thank yellow"
IDENTITY = Identity(PHRASE, Wallet.from_secret(parse_token(PHRASE)).wallet_id, '{"format": 1}\n')
PASSPHRASE = "correct horse \u00e9 battery"
SEALED = seal(IDENTITY, PASSPHRASE)


def test_what_was_sealed_comes_back() -> None:
    assert unseal(SEALED, PASSPHRASE) == IDENTITY
    assert unseal(SEALED, "correct horse e\u0301 battery") == IDENTITY  # as another keyboard composes it
    assert seal(IDENTITY, PASSPHRASE) != SEALED
    assert all(word not in SEALED.decode() for word in (*PHRASE.split()[:3], "private_key"))
    assert PHRASE not in repr(IDENTITY)


def test_a_wrong_passphrase_is_told_as_one() -> None:
    with pytest.raises(TokenError, match="does not match this backup"):
        unseal(SEALED, PASSPHRASE + " ")
    with pytest.raises(TokenError, match="shorter than 8"):
        seal(IDENTITY, "short")


@pytest.mark.parametrize("length", [0, 1, 40, 300, 500, -3])
def test_a_cut_file_is_damaged(length: int) -> None:
    with pytest.raises(StorageError, match="The backup is damaged"):
        unseal(SEALED[:length], PASSPHRASE)


@pytest.mark.parametrize("name", ["wallet_id", "salt", "nonce", "sealed", "sha256"])
def test_a_changed_digit_is_damage(name: str) -> None:
    content = json.loads(SEALED)
    content[name] = ("0" if content[name][0] != "0" else "1") + content[name][1:]
    with pytest.raises(StorageError, match="The backup is damaged"):
        unseal(json.dumps(content).encode(), PASSPHRASE)


@pytest.mark.parametrize("changed", [{"version": 2}, {"version": "1"}, {"version": None}])
def test_another_version_is_named(changed: dict[str, object]) -> None:
    with pytest.raises(StorageError, match="The backup has version"):
        unseal(json.dumps(json.loads(SEALED) | changed).encode(), PASSPHRASE)


@pytest.mark.parametrize("data", [b"[]", b"null", b"\xff\xfe", b'{"format": "x"}', b" " * 100_000, b"[" * 5000])
def test_other_files_are_no_backups(data: bytes) -> None:
    with pytest.raises(StorageError, match="The backup is damaged"):
        unseal(data, PASSPHRASE)


def test_a_file_cannot_claim_another_wallet_with_a_right_checksum() -> None:
    from neuroshard.identity.backup import _checksum  # pyright: ignore[reportPrivateUsage]

    content = json.loads(SEALED) | {"wallet_id": "ab" * 8}
    del content["sha256"]
    forged = json.dumps({**content, "sha256": _checksum(content)}).encode()
    with pytest.raises(TokenError):
        unseal(forged, PASSPHRASE)
