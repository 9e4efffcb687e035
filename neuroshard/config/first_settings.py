"""What the first run stores: the token in a file of its own, the settings, and where the data folder is."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from neuroshard.config.atomic_write import write_atomically
from neuroshard.config.data_dir import NodePaths, home_data_dir, prepare_data_dir
from neuroshard.config.loading import read_config, read_token_file
from neuroshard.config.saving import edit_toml, save_settings
from neuroshard.errors import ConflictError, StorageError, TokenError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import SecretStr

TOKEN_FILE = "keys/wallet"  # noqa: S105 - below the data folder, so that the two can be moved together


@dataclass(frozen=True)
class FirstSettings:
    """What the owner chose before the first start; `settings` only what differs from the defaults."""

    data_dir: Path
    token: SecretStr
    settings: Mapping[str, object] = field(default_factory=dict[str, object])


def stored_token(data_dir: Path) -> SecretStr | None:
    """The token that a first run left in this folder. Raises TokenError for a file that is there but unusable."""
    file = data_dir / TOKEN_FILE
    return read_token_file(file)[0] if file.exists() else None


def store_first_settings(first: FirstSettings, home: Path | None = None) -> None:
    """Store everything, the line that makes it count last: after a kill in between the next start asks again.

    `home` is where starts look first, `home_data_dir` by default; another data folder is named in its config.toml.
    None among the settings goes back to the default. Raises StorageError, UsageError for a wrong setting, and
    ConflictError when the folder holds another token: no wallet is ever overwritten.
    """
    home = home_data_dir().absolute() if home is None else home
    prepare_data_dir(first.data_dir)
    _store_token(first.data_dir, first.token.get_secret_value())
    save_settings(first.data_dir, {**first.settings, "token_file": TOKEN_FILE})
    if first.data_dir != home:
        _name_data_dir(home, first.data_dir)


def _store_token(data_dir: Path, token: str) -> None:
    file = data_dir / TOKEN_FILE
    try:
        known = stored_token(data_dir)
    except TokenError as error:
        raise ConflictError(
            f"{file} is there and holds no usable token: {error.message}", "Move that file away, or mend it."
        ) from error
    if known is not None and known.get_secret_value().split() != token.split():
        raise ConflictError(f"The folder {data_dir} holds another wallet.", "Use that wallet, or another folder.")
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        if known is None:
            write_atomically(file, f"{token}\n".encode(), mode=0o600)
        elif os.name == "posix":
            file.chmod(0o600)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror}.", "Choose another folder.") from error


def _name_data_dir(home: Path, data_dir: Path) -> None:
    """Let the next start find the folder; below the user's home by a name that stays true when that is moved."""
    users_home = Path.home()
    named = f"~/{data_dir.relative_to(users_home).as_posix()}" if data_dir.is_relative_to(users_home) else str(data_dir)
    config = NodePaths.below(home).config_file
    prepare_data_dir(home)
    expected = read_config(config) | {"data_dir": named}
    try:
        old = config.read_text(encoding="utf-8") if config.exists() else ""
        write_atomically(config, edit_toml(old, {"data_dir": named}, expected).encode())
    except OSError as error:
        raise StorageError(f"{config} cannot be written: {error.strerror}.", "Use the default data folder.") from error
