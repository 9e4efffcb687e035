"""Store settings in config.toml, and the token and settings of the first run.

All settings are checked together before they are written atomically; other keys and comments are kept."""

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
    """The values now in config.toml for the changed keys (None: the default), and when they take effect."""

    values: Mapping[str, JsonValue]
    checked: Settings  # from config.toml alone, without flags and environment
    at_once: tuple[str, ...]
    after_restart: tuple[str, ...]
    overridden: Mapping[str, Source]  # stored, but a flag or the environment overrides it, also at the next start


def save_settings(
    data_dir: Path, changes: Mapping[str, object], sources: Mapping[str, Source] | None = None
) -> SavedSettings:
    """Check the changes together with the stored settings, then write config.toml once. None removes a key.

    `sources` of the running settings show which changes have no effect. Raises UsageError, and changes nothing, when
    a key is unknown or secret or its value is wrong; StorageError when the file cannot be written.
    """
    path = NodePaths.below(data_dir).config_file
    named = {_storable(key): value for key, value in changes.items()}
    stored = {key: value for key, value in (read_config(path) | named).items() if value is not None}
    origin: dict[str, Source] = {key: "config.toml" for key in stored if key not in named}
    checked = check_settings({**stored, "data_dir": data_dir}, origin)
    # Write the checked value, not the text it was parsed from: the next start then reads the same value.
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
    """Replace the changed lines of `text`, so that comments are kept.

    If the result does not parse as `expected`, such as after a value over several lines, all of it is rewritten.
    """
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
    """Encode a scalar, or a list of scalars, as TOML 1.0 on one line. Raises UsageError for any other type."""
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
            # A JSON string is a TOML basic string, except for DEL. Surrogate halves have no UTF-8 form.
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise UsageError("The text contains characters that cannot be stored.", "Enter it again.")
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
    """A checked value in the form in which a TOML parser returns it."""
    if isinstance(value, tuple):
        return list(cast("tuple[object, ...]", value))
    return str(value) if isinstance(value, Path) else value


def _storable(key: str) -> str:
    name = ALIASES.get(key, key)
    if name not in Settings.model_fields:
        raise UsageError(f"Unknown setting {key}.", f"Valid are: {', '.join(Settings.model_fields)}.")
    if name in SECRET_KEYS or note_of(name).applies is Applies.NOT_STORED:
        raise UsageError(f"{name} cannot be stored here.", f"It is set {Applies.NOT_STORED}.")
    return name


TOKEN_FILE = "keys/wallet"  # noqa: S105 - below the data folder, so that the two can be moved together


@dataclass(frozen=True)
class FirstSettings:
    """The owner's choices before the first start. `settings` contains only the values that were chosen."""

    data_dir: Path
    token: SecretStr
    settings: Mapping[str, object] = field(default_factory=dict[str, object])


def stored_token(data_dir: Path) -> SecretStr | None:
    """The token that a first run stored in this folder, or None. Raises TokenError for an unusable token file."""
    file = data_dir / TOKEN_FILE
    return read_token_file(file)[0] if file.exists() else None


def store_first_token(first: FirstSettings) -> None:
    """Store the token; no start uses it before the settings are stored, too. Raises StorageError, ConflictError.

    So a folder of another wallet is refused before anything in it changes.
    """
    prepare_data_dir(first.data_dir)
    _store_token(first.data_dir, first.token.get_secret_value())


def store_first_settings(first: FirstSettings, home: Path | None = None) -> None:
    """Store the token, then the settings, then the location of the data folder.

    The last line makes the rest effective, so that after a kill in between the next start asks again. A start looks
    in `home` first (default: `home_data_dir`); its config.toml names the data folder if that is another one. None
    among the settings restores the default. Raises StorageError, UsageError for a wrong setting, and ConflictError
    when the folder contains another token: a wallet is never overwritten.
    """
    home = home_data_dir().absolute() if home is None else home
    store_first_token(first)
    save_settings(first.data_dir, {**first.settings, "token_file": TOKEN_FILE})
    if first.data_dir != home:
        _name_data_dir(home, first.data_dir)


def _store_token(data_dir: Path, token: str) -> None:
    file = data_dir / TOKEN_FILE
    try:
        known = stored_token(data_dir)
    except TokenError as error:
        raise ConflictError(
            f"{file} exists but contains no usable token: {error.message}", "Move that file away, or correct it."
        ) from error
    if known is not None and known.get_secret_value().split() != token.split():
        raise ConflictError(f"The folder {data_dir} belongs to another wallet.", "Use that wallet, or another folder.")
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        if known is None:
            write_atomically(file, f"{token}\n".encode(), mode=0o600)
        elif os.name == "posix":
            file.chmod(0o600)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror}.", "Choose another folder.") from error


def _name_data_dir(home: Path, data_dir: Path) -> None:
    """Store the data folder's location for the next start; relative to the user's home if it is inside it."""
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
