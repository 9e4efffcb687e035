"""An identity backup: the wallet's token and the node key in a small file, sealed with a passphrase. Nothing here logs.

The key is derived from the passphrase with scrypt (RFC 7914), the cipher is ChaCha20-Poly1305 (RFC 8439), and the
readable fields are authenticated with the sealed part. A version fixes every parameter, so a file cannot demand memory
or time.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import unicodedata
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from msgspec import Meta, Struct

from neuroshard.decoders import read_json
from neuroshard.errors import StorageError, TokenError
from neuroshard.identity.strict_json import canonical_json
from neuroshard.identity.wallet import MAX_TOKEN_CHARACTERS, SCRYPT_N, SCRYPT_R
from neuroshard.types import WALLET_ID_DIGITS, HexDigest, JsonValue

MAX_BACKUP_BYTES = 64 * 1024
LEAST_PASSPHRASE_CHARACTERS = 8
FORMAT = "neuroshard identity backup"
VERSION = 1
_SCRYPT_P = 2
_SCRYPT_MEMORY = 80 * 1024 * 1024  # OpenSSL's limit for scrypt; N r 128 bytes are 64 MiB of it
_SALT_BYTES, _NONCE_BYTES, _TAG_BYTES = 16, 12, 16


class BackupVersion(Struct, frozen=True):
    """The fields that every version of the file has."""

    format: str
    version: int | str | None = None


class BackupHead(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that anyone can read. They are authenticated with the sealed part."""

    format: Literal["neuroshard identity backup"]
    version: Literal[1]
    wallet_id: Annotated[str, Meta(max_length=WALLET_ID_DIGITS)]
    salt: Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * _SALT_BYTES}}}\Z")]
    nonce: Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * _NONCE_BYTES}}}\Z")]


class BackupFile(BackupHead, frozen=True):
    """The content of a backup file."""

    sealed: Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{2})*\Z", min_length=2 * _TAG_BYTES)]
    sha256: HexDigest


class SealedPart(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the sealed part, in JSON."""

    token: Annotated[str, Meta(max_length=MAX_TOKEN_CHARACTERS)]
    node_key: Annotated[str, Meta(max_length=MAX_BACKUP_BYTES)] | None

    def __repr__(self) -> str:
        return "SealedPart()"


@dataclass(frozen=True)
class Identity:
    """The content of a backup; `node_key` is the content of the node's key file, None before the first start."""

    token: str = field(repr=False)
    wallet_id: str
    node_key: str | None = field(repr=False)


def seal(identity: Identity, passphrase: str) -> bytes:
    """Return the content of a backup file. Raises TokenError for a passphrase that is too short."""
    if len(passphrase) < LEAST_PASSPHRASE_CHARACTERS:
        raise TokenError(
            f"The passphrase is shorter than {LEAST_PASSPHRASE_CHARACTERS} characters.", "Choose a longer one."
        )
    salt, nonce = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_NONCE_BYTES)
    shown: dict[str, JsonValue] = msgspec.to_builtins(
        BackupHead(FORMAT, VERSION, identity.wallet_id, salt.hex(), nonce.hex())
    )
    secret = canonical_json({"token": identity.token, "node_key": identity.node_key})
    sealed = ChaCha20Poly1305(_key(passphrase, salt)).encrypt(nonce, secret, canonical_json(shown))
    content = {**shown, "sealed": sealed.hex()}
    return json.dumps({**content, "sha256": _checksum(content)}, indent=1).encode() + b"\n"


def unseal(data: bytes, passphrase: str) -> Identity:
    """Return the identity in a backup file.

    Raises StorageError if the file is damaged, cut or of another version, TokenError for a wrong passphrase.
    """
    try:
        found = read_json(data, BackupVersion, MAX_BACKUP_BYTES)
        if found.format == FORMAT and found.version != VERSION:
            version = str(found.version)[:20]
            raise StorageError(
                f"The backup has version {version}; this program reads version {VERSION}.", "Use a newer NeuroShard."
            )
        backup = read_json(data, BackupFile, MAX_BACKUP_BYTES)
    except ValueError as error:
        raise _damaged(f"it is incomplete: {error}") from None
    content = msgspec.to_builtins(backup)
    checksum, shown = content.pop("sha256"), {name: content[name] for name in BackupHead.__struct_fields__}
    if checksum != _checksum(content):
        raise _damaged("its checksum does not match")
    salt, nonce, sealed = (bytes.fromhex(text) for text in (backup.salt, backup.nonce, backup.sealed))
    try:
        secret = ChaCha20Poly1305(_key(passphrase, salt)).decrypt(nonce, sealed, canonical_json(shown))
    except InvalidTag:
        raise TokenError("The passphrase does not match this backup.", "Try again; nothing was changed.") from None
    return _identity(secret, backup.wallet_id)


def _identity(secret: bytes, wallet_id: str) -> Identity:
    try:
        held = read_json(secret, SealedPart, MAX_BACKUP_BYTES)
    except ValueError as error:
        raise _damaged(str(error)) from None
    return Identity(held.token, wallet_id, held.node_key)


def _key(passphrase: str, salt: bytes) -> bytes:
    text = unicodedata.normalize("NFKD", passphrase).encode("utf-8", "surrogatepass")
    return hashlib.scrypt(text, salt=salt, n=SCRYPT_N, r=SCRYPT_R, p=_SCRYPT_P, maxmem=_SCRYPT_MEMORY, dklen=32)


def _checksum(content: dict[str, JsonValue]) -> str:
    """Distinguishes damage from a wrong passphrase; it protects nothing."""
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _damaged(reason: str) -> StorageError:
    return StorageError(f"The backup is damaged: {reason}.", "Use another copy of the file.")
