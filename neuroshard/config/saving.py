"""Store settings in config.toml, and everything that the first run stores.

Settings are checked as a whole first and written atomically; other keys and comments are kept."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from neuroshard.config.folders import NodePaths, home_data_dir, prepare_data_dir
from neuroshard.config.loading import check_settings, read_config, read_token_file, shown_value
from neuroshard.config.settings import ALIASES, SECRET_KEYS, Applies, Settings, note_of
from neuroshard.config.state_file import write_atomically
from neuroshard.errors import ConflictError, StorageError, TokenError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import SecretStr

    from neuroshard.config.loading import Source
    from neuroshard.types import JsonValue


@dataclass(frozen=True)
class SavedSettings:
    """What now stands in config.toml for the changed keys (None: back to the default), and when it holds."""

    values: Mapping[str, JsonValue]
    checked: Settings  # of what stands in config.toml alone
    at_once: tuple[str, ...]
    after_restart: tuple[str, ...]
    overridden: Mapping[str, Source]  # stored, but a flag or the environment wins at the next start as well


def save_settings(
    data_dir: Path, changes: Mapping[str, object], sources: Mapping[str, Source] | None = None
) -> SavedSettings:
    """Check the changes together with what is stored, then write config.toml once. None removes a key.

    `sources` (of the running settings) tells which changes stay without effect. Raises UsageError and changes
    nothing when a key is unknown, a secret or wrong; StorageError when the file cannot be written.
    """
    path = NodePaths.below(data_dir).config_file
    named = {_storable(key): value for key, value in changes.items()}
    stored = {key: value for key, value in (read_config(path) | named).items() if value is not None}
    origin: dict[str, Source] = dict.fromkeys(stored, "config.toml")
    checked = check_settings({**stored, "data_dir": data_dir}, origin)
    # What is written is what the next start reads: the checked value, not the text it was parsed from.
    final = {key: None if value is None else _plain(getattr(checked, key)) for key, value in named.items()}
    expected = {key: value for key, value in (read_config(path) | final).items() if value is not None}
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        write_atomically(path, edit_toml(old, final, expected).encode())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}.", "The settings are unchanged.") from error
    winners: dict[str, Source] = {
        key: sources[key] for key in named if sources and sources[key] in {"flag", "environment"}
    }
    return SavedSettings(
        values={key: shown_value(key, value) for key, value in final.items()},
        checked=checked,
        at_once=tuple(key for key in named if note_of(key).applies is Applies.AT_ONCE),
        after_restart=tuple(key for key in named if note_of(key).applies is Applies.AFTER_RESTART),
        overridden=winners,
    )


def edit_toml(text: str, changes: Mapping[str, object], expected: Mapping[str, object]) -> str:
    """`text` with the changed lines replaced, so that comments survive; rewritten whole when lines are not enough."""
    lines = text.splitlines()
    for key, value in changes.items():
        names = "|".join([key, *(alias for alias, name in ALIASES.items() if name == key)])
        pattern = re.compile(rf'\s*"?({names})"?\s*=')
        new = [] if value is None else [f"{key} = {toml_value(value)}"]
        kept = [index for index, line in enumerate(lines) if pattern.match(line)]
        position = kept[0] if kept else len(lines)
        lines = [line for index, line in enumerate(lines) if index not in kept]
        lines[position:position] = new
    edited = "".join(f"{line}\n" for line in lines)
    if _parses_as(edited, expected):
        return edited
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in expected.items())


def toml_value(value: object) -> str:
    """A scalar, or a list of scalars, as TOML 1.0 text on one line. Raises UsageError for anything else."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_scalar, cast('Sequence[object]', value)))}]"
    return _toml_scalar(value)


def _toml_scalar(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return repr(value)
        case str():
            # JSON strings are TOML basic strings, but for DEL; surrogate halves have no UTF-8 form
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise UsageError("A text with broken characters cannot be stored.", "Write it anew.")
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            raise UsageError(f"A value of type {type(value).__name__} cannot be stored in config.toml.")


def _parses_as(text: str, expected: Mapping[str, object]) -> bool:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return {ALIASES.get(key, key): value for key, value in table.items()} == expected


def _plain(value: object) -> object:
    """A checked value as TOML gives it back."""
    if isinstance(value, tuple):
        return list(cast("tuple[object, ...]", value))
    return str(value) if isinstance(value, Path) else value


def _storable(key: str) -> str:
    name = ALIASES.get(key, key)
    if name not in Settings.model_fields:
        raise UsageError(f"Unknown setting {key}.", f"Valid are: {', '.join(Settings.model_fields)}.")
    if name in SECRET_KEYS or note_of(name).applies is Applies.NOT_STORED:
        raise UsageError(f"{name} is never stored from here.", f"It is set {Applies.NOT_STORED}.")
    return name


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
