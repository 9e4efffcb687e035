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

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from neuroshard.errors import StorageError, TokenError
from neuroshard.identity.strict_json import canonical_json, exact_object, hex_field, parse_json, text_field
from neuroshard.identity.wallet import MAX_TOKEN_CHARACTERS, SCRYPT_N, SCRYPT_R
from neuroshard.types import JsonValue

MAX_BACKUP_BYTES = 64 * 1024
LEAST_PASSPHRASE_CHARACTERS = 8
FORMAT = "neuroshard identity backup"
VERSION = 1
_SCRYPT_P = 2
_SCRYPT_MEMORY = 80 * 1024 * 1024  # OpenSSL's limit for scrypt; N r 128 bytes are 64 MiB of it
_SALT_BYTES, _NONCE_BYTES, _TAG_BYTES = 16, 12, 16
_SHOWN = {"format", "version", "wallet_id", "salt", "nonce"}


@dataclass(frozen=True)
class Identity:
    """The content of a backup; `node_key` is the content of the node's key file, None before the first start."""

    token: str = field(repr=False)
    wallet_id: str
    node_key: str | None = field(repr=False)


def seal(identity: Identity, passphrase: str) -> bytes:
    """Return the content of a backup file. Raises TokenError for a passphrase that is too short."""
    if len(passphrase) < LEAST_PASSPHRASE_CHARACTERS:
        raise TokenError(f"The passphrase is shorter than {LEAST_PASSPHRASE_CHARACTERS} characters.", "Take a longer.")
    salt, nonce = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_NONCE_BYTES)
    shown: dict[str, JsonValue] = {
        "format": FORMAT,
        "version": VERSION,
        "wallet_id": identity.wallet_id,
        "salt": salt.hex(),
        "nonce": nonce.hex(),
    }
    secret = canonical_json({"token": identity.token, "node_key": identity.node_key})
    sealed = ChaCha20Poly1305(_key(passphrase, salt)).encrypt(nonce, secret, canonical_json(shown))
    content = {**shown, "sealed": sealed.hex()}
    return json.dumps({**content, "sha256": _checksum(content)}, indent=1).encode() + b"\n"


def unseal(data: bytes, passphrase: str) -> Identity:
    """Return the identity in a backup file.

    Raises StorageError if the file is damaged, cut or of another version, TokenError for a wrong passphrase.
    """
    try:
        value = parse_json(data, MAX_BACKUP_BYTES)
    except ValueError as error:
        raise _damaged(f"it is not a whole backup: {error}") from None
    if isinstance(value, dict) and value.get("format") == FORMAT and value.get("version") != VERSION:
        version = str(value.get("version"))[:20]
        raise StorageError(f"The backup has version {version}; known is {VERSION}.", "Use a newer NeuroShard.")
    try:
        content = exact_object(value, {*_SHOWN, "sealed", "sha256"}, "the file")
        shown = {name: content[name] for name in _SHOWN}
        salt = hex_field(content["salt"], _SALT_BYTES, "salt")
        nonce = hex_field(content["nonce"], _NONCE_BYTES, "nonce")
        sealed = bytes.fromhex(text_field(content["sealed"], MAX_BACKUP_BYTES, "sealed"))
        wallet_id = text_field(content["wallet_id"], 16, "wallet_id")
    except ValueError as error:
        raise _damaged(str(error)) from None
    if content["format"] != FORMAT or content["sha256"] != _checksum({**shown, "sealed": content["sealed"]}):
        raise _damaged("its checksum is not the one it was written with")
    try:
        secret = ChaCha20Poly1305(_key(passphrase, salt)).decrypt(nonce, sealed, canonical_json(shown))
    except InvalidTag:
        raise TokenError("The passphrase is not that of this backup.", "Try again; nothing was changed.") from None
    return _identity(secret, wallet_id)


def _identity(secret: bytes, wallet_id: str) -> Identity:
    try:
        held = exact_object(parse_json(secret, MAX_BACKUP_BYTES), {"token", "node_key"}, "the sealed part")
        token = text_field(held["token"], MAX_TOKEN_CHARACTERS, "token")
        node_key = None if held["node_key"] is None else text_field(held["node_key"], MAX_BACKUP_BYTES, "node_key")
    except ValueError as error:
        raise _damaged(str(error)) from None
    return Identity(token, wallet_id, node_key)


def _key(passphrase: str, salt: bytes) -> bytes:
    text = unicodedata.normalize("NFKD", passphrase).encode("utf-8", "surrogatepass")
    return hashlib.scrypt(text, salt=salt, n=SCRYPT_N, r=SCRYPT_R, p=_SCRYPT_P, maxmem=_SCRYPT_MEMORY, dklen=32)


def _checksum(content: dict[str, JsonValue]) -> str:
    """Distinguishes damage from a wrong passphrase; it protects nothing."""
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _damaged(reason: str) -> StorageError:
    return StorageError(f"The backup is damaged: {reason}.", "Take another copy of the file.")
