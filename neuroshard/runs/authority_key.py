"""The authority key of an organiser on this computer, made once, in one private file of the data folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from neuroshard.config.state_file import StateFile
from neuroshard.errors import StorageError
from neuroshard.identity.signing import SigningKey
from neuroshard.types import HexKey

ORGANISER_FOLDER = "organiser"
KEY_FILE = "authority-key"


class AuthorityKeyFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the key file."""

    format: Literal[1]
    public_key: HexKey
    private_key: HexKey  # the seed

    def __repr__(self) -> str:
        return f"AuthorityKeyFile({self.public_key})"


def load_or_create_authority_key(data_dir: Path) -> SigningKey:
    """Return the authority key of a data folder, which is created if it is missing. Raises StorageError."""
    folder = data_dir / ORGANISER_FOLDER
    file = StateFile(
        folder / KEY_FILE,
        AuthorityKeyFile,
        "fail",
        "Restore it from a backup. Without it this organiser cannot admit nodes: move it away, and sign a version of "
        "the run that names a new key.",
        data_dir=data_dir,
    )
    with file.alone():
        held = file.read()
        if held is None:
            key = SigningKey.generate()
            file.write(AuthorityKeyFile(1, key.public_key.hex(), key.seed.hex()))
            return key
    key = SigningKey.from_seed(bytes.fromhex(held.private_key))
    if key.public_key.hex() != held.public_key:
        raise StorageError(f"{file.path} is damaged: the keys do not belong together.", file.if_damaged)
    return key
