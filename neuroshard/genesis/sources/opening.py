"""From the configuration of a source to something that can be read."""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

from neuroshard.genesis.plain_text import TEXT_SUFFIXES
from neuroshard.genesis.sources.configuration import SourceConfiguration
from neuroshard.genesis.sources.extras import datasets, parquet
from neuroshard.genesis.sources.file_source import FileSource
from neuroshard.genesis.sources.hugging_face import HuggingFaceSource
from neuroshard.genesis.sources.json_lines import JSON_LINES_SUFFIXES, JsonLines
from neuroshard.genesis.sources.parquet import ParquetRows
from neuroshard.genesis.sources.records import DocumentSource
from neuroshard.genesis.sources.text_files import read_text_file


def open_source(source: SourceConfiguration, *, follows: bool = False) -> DocumentSource:
    """The source that is meant. With `follows` it may grow while it is read.

    Raises UsageError when a library that this kind needs is not installed.
    """
    name, root, field = source.name, Path(source.location), source.text_field
    match source.kind:
        case "text":
            return FileSource(name, root, TEXT_SUFFIXES, read_text_file)
        case "jsonl":
            return FileSource(name, root, JSON_LINES_SUFFIXES, JsonLines(name, field, follows).read)
        case "parquet":
            parquet()
            return FileSource(name, root, (".parquet",), ParquetRows(name, field).read)
        case "huggingface":
            datasets()
            return HuggingFaceSource(name, source.location, source.subset, source.split, field, source.revision)
        case _:
            assert_never(source.kind)
