"""The configuration of a population: its sources and vocabulary, as TOML or JSON.

The JSON form of earlier systems, with hf_path and hf_name, is accepted too."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from neuroshard.config.folders import expanded
from neuroshard.data.manifest import DEFAULT_SHARD_TOKENS, MAX_SHARD_TOKENS, MAX_SHARDS
from neuroshard.data.tokenizer.table import FIRST_MERGE_ID, MAX_VOCABULARY
from neuroshard.dataset.packing import MIN_SHARD_TOKENS, MIN_SHARDS
from neuroshard.errors import StorageError, UsageError

SHIPPED_CONFIGURATION = "genesis"  # `--config genesis` is the file that comes with this package
MAX_CONFIGURATION_BYTES = 1_000_000
_SHIPPED_FILE = Path(__file__).with_name("genesis.toml")
_CLASSIC_NAMES = {"hf_path": "location", "hf_name": "subset"}

Kind = Literal["huggingface", "parquet", "jsonl", "text"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SourceConfiguration(_Section):
    """One source of documents."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]  # of the log file and in the manifest
    kind: Kind
    location: Annotated[str, Field(min_length=1, max_length=4096)]  # file, folder or Hugging Face dataset
    subset: Annotated[str, Field(max_length=200)] | None = None  # of a Hugging Face dataset
    split: Annotated[str, Field(min_length=1, max_length=200)] = "train"  # of a Hugging Face dataset
    revision: Annotated[str, Field(min_length=1, max_length=200)] | None = None  # of a Hugging Face dataset
    text_field: Annotated[str, Field(min_length=1, max_length=200)] = "text"
    target_shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)]
    priority: int = 1  # the lowest runs first; equal ones run in the order of the file
    enabled: bool = True

    @property
    def origin(self) -> str:
        """The origin that positions belong to: a position has no meaning under another origin."""
        if self.kind != "huggingface":
            return self.kind
        return ":".join((self.kind, self.location, self.subset or "", self.split, self.revision or ""))


class VocabularyConfiguration(_Section):
    """Settings for learning the token table."""

    merges: Annotated[int, Field(ge=0, le=MAX_VOCABULARY - FIRST_MERGE_ID)] = 31_734
    first_source_merges: Annotated[int, Field(ge=0)] = 2_500  # the rest is split over the others by target_shards
    sample_documents: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000  # read from each source


class PopulationConfiguration(_Section):
    """The contents of a population's configuration file."""

    sources: Annotated[tuple[SourceConfiguration, ...], Field(min_length=1, max_length=64, strict=False)]
    vocabulary: VocabularyConfiguration = VocabularyConfiguration()
    # A data set too small for 16 shards of this size gets smaller ones.
    tokens_per_shard: Annotated[int, Field(ge=MIN_SHARD_TOKENS, le=MAX_SHARD_TOKENS)] = DEFAULT_SHARD_TOKENS

    def active(self) -> tuple[SourceConfiguration, ...]:
        enabled = (source for source in self.sources if source.enabled)
        return tuple(sorted(enabled, key=lambda source: source.priority))


@dataclass(frozen=True)
class _Document:
    file: Path
    content: Mapping[str, object]


def load_configuration(path: Path) -> PopulationConfiguration:
    """Read the file; the name `genesis` stands for the shipped one unless there is a file of that name.

    Relative locations of local sources are made relative to the file. Raises UsageError that names the file, the
    source and the field; StorageError when the file cannot be read.
    """
    file = _SHIPPED_FILE if path == Path(SHIPPED_CONFIGURATION) and not path.exists() else path
    document = _Document(file, _normalised(file, _parse(file)))
    try:
        configuration = PopulationConfiguration.model_validate(document.content)
    except ValidationError as error:
        complaints = [_complaint(document, detail["loc"], detail["msg"]) for detail in error.errors()]
        raise UsageError(" ".join(complaints)) from None
    _check_together(file, configuration)
    return configuration.model_copy(
        update={"sources": tuple(_located(source, file.parent) for source in configuration.sources)}
    )


def _parse(file: Path) -> object:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIGURATION_BYTES + 1)
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror or error}.") from error
    if len(data) > MAX_CONFIGURATION_BYTES:
        raise UsageError(f"{file} is larger than {MAX_CONFIGURATION_BYTES} bytes.", "It must contain only sources.")
    try:
        text = data.decode("utf-8-sig")
        return json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        form = "JSON" if file.suffix == ".json" else "TOML"
        raise UsageError(f"{file} is not {form}: {error}.") from error


def _normalised(file: Path, content: object) -> Mapping[str, object]:
    """Return the form {"sources": [...]} of that form, a bare list, or {"sources": {name: {...}}}."""
    table = {"sources": cast("object", content)} if isinstance(content, list) else content
    if not isinstance(table, dict):
        raise UsageError(f"{file} must be a table with a list of sources.")
    values = cast("dict[str, object]", table)
    sources = values.get("sources")
    if isinstance(sources, dict):
        named = cast("dict[str, object]", sources)
        sources = [{"name": name, **_mapping(item)} for name, item in named.items()]
    if not isinstance(sources, list):
        raise UsageError(
            f"{file} names no sources.", 'Begin each with [[sources]], or in JSON put them under "sources".'
        )
    items = cast("list[object]", sources)
    return {**values, "sources": [_from_classic(file, item) for item in items]}


def _mapping(item: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", item) if isinstance(item, dict) else {}


def _from_classic(file: Path, item: object) -> object:
    """Convert hf_path and hf_name to location and subset of a Hugging Face source."""
    values = _mapping(item)
    if not values.keys() & _CLASSIC_NAMES.keys():
        return item
    twice = [old for old, new in _CLASSIC_NAMES.items() if old in values and new in values]
    if twice:
        raise UsageError(
            f"{file}: source {values.get('name')!r} has both {twice[0]} and {_CLASSIC_NAMES[twice[0]]}.", "Keep one."
        )
    return {"kind": "huggingface", **{_CLASSIC_NAMES.get(name, name): value for name, value in values.items()}}


def _complaint(document: _Document, place: Sequence[int | str], problem: str) -> str:
    """Return one sentence with the file, the source's name or number, the field, and the problem."""
    where: list[str] = [str(part) for part in place]
    if len(place) > 1 and place[0] == "sources" and isinstance(place[1], int):
        items = cast("Sequence[object]", document.content["sources"])
        name = _mapping(items[place[1]]).get("name")
        where = [f"source {name!r}" if isinstance(name, str) else f"source number {place[1] + 1}", *where[2:]]
    return f"{document.file}: {', '.join(where)}: {problem}."


def _check_together(file: Path, configuration: PopulationConfiguration) -> None:
    names = [source.name for source in configuration.sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{file}: two sources have the name {twice!r}.", "Give each its own.")
    for source in configuration.sources:
        for field in {"subset", "split", "revision"} & source.model_fields_set:
            if source.kind != "huggingface":
                raise UsageError(f"{file}: source {source.name!r}, {field}: only a Hugging Face dataset has one.")
    active = configuration.active()
    if not active:
        raise UsageError(f"{file}: no source is enabled.", "Set enabled = true for at least one.")
    wanted = sum(source.target_shards for source in active)
    if wanted < MIN_SHARDS:
        raise UsageError(
            f"{file}: the enabled sources have {wanted} target_shards together; a data set has at least {MIN_SHARDS}.",
            "Raise target_shards.",
        )


def _located(source: SourceConfiguration, folder: Path) -> SourceConfiguration:
    """Return a local source (or local dataset) with its location relative to the file's folder."""
    local = folder / expanded(source.location)
    if source.kind == "huggingface" and not (source.location.startswith((".", "/", "~")) and local.is_dir()):
        return source
    return source.model_copy(update={"location": str(local)})
