"""The models of organised runs that ship with the program, as parts of a run's file: architecture and stages."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from importlib.resources import files

from neuroshard.errors import UsageError
from neuroshard.types import JsonValue

_SUFFIX = ".toml"


def config_names() -> tuple[str, ...]:
    """Names of the shipped models, in order."""
    entries = files("neuroshard.model").joinpath("configs").iterdir()
    return tuple(sorted(entry.name.removesuffix(_SUFFIX) for entry in entries if entry.name.endswith(_SUFFIX)))


def named_config(name: JsonValue) -> dict[str, JsonValue]:
    """Entries of a shipped model, with a table `architecture`. Raises UsageError with the near names."""
    known = config_names()
    if not isinstance(name, str) or name not in known:
        near = get_close_matches(str(name)[:60], known, n=3, cutoff=0.4)
        hint = f"Near names: {', '.join(near)}." if near else f"Known are: {', '.join(known)}."
        raise UsageError(f"architecture.config = {name!r:.60} is not a model that ships with the program.", hint)
    file = files("neuroshard.model").joinpath("configs", name + _SUFFIX)
    return tomllib.loads(file.read_text(encoding="utf-8"))
