"""Where the populator's documents come from: the configuration of sources, and a reader for each kind of them."""

from neuroshard.genesis.sources.configuration import (
    SHIPPED_CONFIGURATION,
    PopulationConfiguration,
    SourceConfiguration,
    VocabularyConfiguration,
    load_configuration,
)
from neuroshard.genesis.sources.opening import open_source
from neuroshard.genesis.sources.records import (
    DocumentSource,
    Position,
    Record,
    RecordReader,
    SourceChangedError,
    SourceFailureError,
)

__all__ = [
    "SHIPPED_CONFIGURATION",
    "DocumentSource",
    "PopulationConfiguration",
    "Position",
    "Record",
    "RecordReader",
    "SourceChangedError",
    "SourceConfiguration",
    "SourceFailureError",
    "VocabularyConfiguration",
    "load_configuration",
    "open_source",
]
