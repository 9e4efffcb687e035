"""The organiser of this computer: its authority key, made once, and the address that it gives to others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from neuroshard.config.state_file import StateFile
from neuroshard.errors import StorageError
from neuroshard.identity.signing import SigningKey
from neuroshard.types import HexKey, RunId

ORGANISER_FOLDER = "organiser"
KEY_FILE = "authority-key"
ADDRESS_FILE = "address.json"


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


class OrganiserAddress(Struct, frozen=True):
    """The public address of an organiser, with which it was started last."""

    url: Annotated[str, Meta(max_length=1000)]


def organiser_folder(data_dir: Path, run_id: RunId) -> Path:
    """The folder of one run's organiser."""
    return data_dir / ORGANISER_FOLDER / run_id[:16]


def organiser_address(data_dir: Path, run_id: RunId) -> StateFile[OrganiserAddress]:
    """The file with the public address of this computer's organiser of a run."""
    return StateFile(
        organiser_folder(data_dir, run_id) / ADDRESS_FILE,
        OrganiserAddress,
        "set_aside",
        "invitations name no organiser until it starts again",
        data_dir=data_dir,
    )
