"""Load the settings: a flag overrides the environment, the environment config.toml, and config.toml the default."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from pydantic import SecretStr, ValidationError

from neuroshard.config.folders import NodePaths, default_data_dir, expanded, home_data_dir
from neuroshard.config.settings import ALIASES, OPPOSITES, REMOVED, SECRET_KEYS, Applies, Settings, note_of
from neuroshard.errors import StorageError, TokenError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic_core import ErrorDetails

    from neuroshard.types import JsonValue


ENVIRONMENT_PREFIX = "NEUROSHARD_"
MAX_CONFIG_BYTES = 1_000_000
MAX_TOKEN_FILE_BYTES = 64_000
_QUOTED = Repr()  # of values in messages: a number of 1,000 digits is shortened to 40 characters
_QUOTED.maxstring = _QUOTED.maxother = 200
_KEY = re.compile(r"""\s*\[*\s*["']?(?P<key>[A-Za-z0-9_-]+)["']?\s*[=.\]]""")

Source: TypeAlias = Literal["flag", "environment", "config.toml", "chosen run", "default"]
_STRENGTH: Mapping[Source, int] = {"default": 0, "chosen run": 1, "config.toml": 2, "environment": 3, "flag": 4}


@dataclass(frozen=True)
class LoadedSettings:
    """Checked settings, and the source of every value."""

    settings: Settings
    sources: Mapping[str, Source]
    warnings: tuple[str, ...] = ()

    @property
    def config_file(self) -> Path:
        """Path of config.toml, whether or not the file exists."""
        return self.settings.paths.config_file

    def describe(self) -> dict[str, JsonValue]:
        """Describe every setting, without secrets: value, source, allowed values, and how and when it changes."""
        return {
            key: {
                "value": shown_value(key, getattr(self.settings, key)),
                "source": self.sources[key],
                "allowed": note_of(key).allowed,
                "applies": str(note_of(key).applies),
                "owner": note_of(key).owner,
            }
            for key in Settings.model_fields
        }


def load_settings(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None, data_dir: Path | None = None
) -> LoadedSettings:
    """Merge and check all sources. A flag that is None was not given; None for `environment` means os.environ.

    `data_dir` replaces the default folder; flag and environment still override it. A token file is read, so that
    `settings.token` contains the token if there is one.
    Raises UsageError with the setting, its source and the allowed values; StorageError for an unreadable config.toml;
    TokenError for an unreadable or empty token file.
    """
    given = _collect({key: value for key, value in flags.items() if value is not None}, "flag")
    variables = _from_environment(os.environ if environment is None else environment)
    folder = _chosen_folder(given, variables, data_dir)
    stored = _placed(read_config(NodePaths.below(folder).config_file), folder)
    merged: dict[str, object] = {}
    sources: dict[str, Source] = dict.fromkeys(Settings.model_fields, "default")
    layers: tuple[tuple[Source, Mapping[str, object]], ...] = (
        ("config.toml", stored),
        ("environment", variables),
        ("flag", given),
    )
    for source, values in layers:
        if {"token", "token_file"} <= values.keys():
            raise UsageError(f"Both token and token_file are given as {source}.", "Give only one of them.")
        merged |= values
        sources |= dict.fromkeys(values, source)
    merged["data_dir"] = folder
    if sources["data_dir"] == "default" and data_dir is None and folder != home_data_dir().absolute():
        sources["data_dir"] = "config.toml"
    settings = check_settings(merged, sources, NodePaths.below(folder).config_file)
    if settings.token_file is None or _STRENGTH[sources["token"]] > _STRENGTH[sources["token_file"]]:
        return LoadedSettings(settings, sources)
    token, warnings = read_token_file(settings.token_file)
    sources["token"] = sources["token_file"]
    return LoadedSettings(settings.model_copy(update={"token": token}), sources, warnings)


def resolve_data_dir(flag: Path | None, environment: Mapping[str, str] | None = None) -> Path:
    """Find the data folder, for commands that need no other setting. Nothing is created. Raises StorageError."""
    variables = _from_environment(os.environ if environment is None else environment)
    return _chosen_folder({} if flag is None else {"data_dir": flag}, variables, None)


def check_settings(
    values: Mapping[str, object], sources: Mapping[str, Source], config_file: Path | None = None
) -> Settings:
    """Validate a merged mapping. Raises UsageError with one sentence per wrong value, with file and line if known."""
    try:
        return Settings.model_validate(dict(values))
    except ValidationError as error:
        places = {} if config_file is None else _places(config_file)
        complaints = dict.fromkeys(_complaint(detail, values, sources, places) for detail in error.errors())
        raise UsageError(" ".join(complaints)) from None  # pydantic's own text may quote a secret


def read_config(path: Path) -> dict[str, object]:
    """Read the keys of config.toml; a missing file has none. Raises UsageError with line or key, or StorageError."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UsageError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes.", "It must contain only settings.")
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.", "Make it readable for this user.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text.", "Save it as UTF-8, or remove it to use the defaults.") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}.", "Correct or remove that line.") from error
    stored = _collect(table, f"key in {path}", _lines(text))
    for key in stored:
        if note_of(key).applies is Applies.NOT_STORED and path.parent != home_data_dir().absolute():
            raise UsageError(f"{key} cannot be set in {path}.", f"It is set {Applies.NOT_STORED}.")
    return stored


def read_token(loaded: LoadedSettings) -> SecretStr:
    """The token of these settings, without surrounding white space.

    Raises TokenError if it is missing or empty, and UsageError if it begins with "-", as an option does.
    """
    token, source = loaded.settings.token, loaded.sources["token"]
    if token is None:
        raise TokenError(
            "No wallet token was given.",
            "Use --token-file, NEUROSHARD_TOKEN, --token, or token_file in config.toml; `neuroshard wallet new` makes "
            "one, at a desktop `neuroshard` asks for it in the browser, and `neuroshard demo` needs none.",
        )
    text = token.get_secret_value().strip()
    if not text:
        raise TokenError(
            f"The wallet token (from {source_name(source, 'token')}) is empty.", "Give your wallet's token."
        )
    if text.startswith("-"):
        raise UsageError(
            f"The wallet token (from {source_name(source, 'token')}) begins with -, as an option does.",
            "Write the token after --token, or use --token-file; `neuroshard --help` lists the options.",
        )
    return SecretStr(text)


def read_token_file(path: Path) -> tuple[SecretStr, tuple[str, ...]]:
    """Read the token in a file, without surrounding white space, and warnings about the file's permissions.

    Raises TokenError when the file cannot be read, is empty, or is longer than MAX_TOKEN_FILE_BYTES.
    """
    try:
        with path.open("rb") as file:
            mode = path.stat().st_mode
            raw = file.read(MAX_TOKEN_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig").strip()
    except OSError as error:
        raise TokenError(f"The token file {path} cannot be read: {error.strerror}.", "Check the path.") from error
    except UnicodeDecodeError:
        raise TokenError(f"The token file {path} is not text.", "Save it as UTF-8.") from None
    if not text or len(raw) > MAX_TOKEN_FILE_BYTES:
        problem = "is empty" if not text else f"is larger than {MAX_TOKEN_FILE_BYTES} bytes"
        raise TokenError(f"The token file {path} {problem}.", "Write the token to it, on one line.")
    warnings: tuple[str, ...] = ()
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        warnings = (f"Other users of this computer can read the token file {path}: run `chmod 600 {path}`.",)
    return SecretStr(text), warnings


def shown_value(key: str, value: object) -> JsonValue:
    """A setting's value as JSON for display. A secret is replaced by "(secret)"."""
    if key in SECRET_KEYS:
        return None if value is None else "(secret)"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [str(item) for item in cast("Sequence[object]", value)]
    return str(value)


def _chosen_folder(given: Mapping[str, object], variables: Mapping[str, object], default: Path | None) -> Path:
    named = given.get("data_dir", variables.get("data_dir"))
    text = str(named if named is not None else default or default_data_dir())
    if not text:
        raise UsageError("data_dir is empty.", "Name a folder, or leave it out.")
    return expanded(text).absolute()


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    named = {name: value for name, value in environment.items() if name.startswith(ENVIRONMENT_PREFIX)}
    return _collect(
        {name.removeprefix(ENVIRONMENT_PREFIX).lower(): value for name, value in named.items()},
        f"environment variable {ENVIRONMENT_PREFIX}",
    )


def _placed(stored: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Stored values with a relative token file resolved against the data folder: both can be moved together."""
    file = stored.get("token_file")
    return {**stored, "token_file": folder / expanded(file)} if isinstance(file, str) else dict(stored)


def _lines(text: str) -> dict[str, int]:
    """Line number, from 1, at which each key or table of a config.toml begins."""
    found = ((number, _KEY.match(line)) for number, line in enumerate(text.splitlines(), start=1))
    return {match["key"]: number for number, match in found if match}


def _places(config_file: Path) -> dict[str, str]:
    """File and line of every setting in a config.toml, as text for error messages."""
    try:
        lines = _lines(config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):  # the file changed since it was read: the message then has no line number
        return {}
    return {ALIASES.get(key, key): f"{config_file}, line {number}" for key, number in lines.items()}


def _collect(values: Mapping[str, object], place: str, lines: Mapping[str, int] | None = None) -> dict[str, object]:
    """The values under canonical names instead of aliases. Raises UsageError for an unknown or a repeated key."""
    collected: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            where = place.removeprefix("key in ")
            raise UsageError(f"{where} has a table [{key}].", "Write one setting per line: port = 8001.")
        known = _known_key(key, place, (lines or {}).get(key))
        if known in collected:
            raise UsageError(f"{known} is given twice as {place}, once as an alias.", "Keep one of the two.")
        collected[known] = value
    return collected


def _known_key(key: str, place: str, line: int | None) -> str:
    """The canonical name of a key, which may be an alias. Raises UsageError with the nearest valid name."""
    name = ALIASES.get(key, key)
    if name in Settings.model_fields:
        return name
    if name in REMOVED:
        hint = f"{name} is no longer a setting: remove it. {REMOVED[name]}"
    elif name in OPPOSITES:
        hint = f"Did you mean {OPPOSITES[name]} = false?"
    else:
        near = get_close_matches(name, [*Settings.model_fields, *ALIASES, *OPPOSITES], n=1, cutoff=0.6)
        nearest = ALIASES.get(near[0], OPPOSITES.get(near[0], near[0])) if near else None
        hint = f"Did you mean {nearest}?" if nearest else f"Valid are: {', '.join(Settings.model_fields)}."
    label = f"{place}{key.upper()}" if place.endswith(ENVIRONMENT_PREFIX) else f"{place}: {key}"
    raise UsageError(f"Unknown {label}{f' (line {line})' if line else ''}.", hint)


def _complaint(
    detail: ErrorDetails, values: Mapping[str, object], sources: Mapping[str, Source], places: Mapping[str, str]
) -> str:
    location: tuple[Any, ...] = detail["loc"]
    key = str(location[0]) if location else "settings"
    source = sources.get(key, "default")
    given = "a value that is not shown" if key in SECRET_KEYS else _QUOTED.repr(values.get(key))
    # The messages of our own validators are specific, such as which address of a list is wrong.
    reason = detail.get("ctx", {}).get("error") if detail["type"] == "value_error" and key not in SECRET_KEYS else None
    because = f" ({str(reason)[:200]})" if reason else ""
    origin = places.get(key, source) if source == "config.toml" else source_name(source, key)
    where = "" if source == "default" else f" (from {origin})"  # no place: it is the value of a form or a request
    return f"{key}{where} cannot be {given}{because}: use {note_of(key).allowed}."


def source_name(source: Source, key: str) -> str:
    """The source of a setting's value as users know it: the flag, the environment variable or config.toml."""
    match source:
        case "flag":
            return f"--{key.replace('_', '-')}"
        case "environment":
            return f"{ENVIRONMENT_PREFIX}{key.upper()}"
        case _:
            return source
