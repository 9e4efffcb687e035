"""Making, checking and serving Genesis folders. Training on them lives elsewhere and needs none of this."""

from neuroshard.genesis.build import STAGES, BuildOptions, BuiltGenesis, build_genesis
from neuroshard.genesis.data_set_status import DataSetStatus, read_status
from neuroshard.genesis.documents import Document, StageProgress, TextSource
from neuroshard.genesis.embedded import StandardLibraryText
from neuroshard.genesis.folder_text import FolderText
from neuroshard.genesis.report import BuildReport, read_report
from neuroshard.genesis.server import GenesisServer
from neuroshard.genesis.verification import Sample, Verification, verify, verify_folder

__all__ = [
    "STAGES",
    "BuildOptions",
    "BuildReport",
    "BuiltGenesis",
    "DataSetStatus",
    "Document",
    "FolderText",
    "GenesisServer",
    "Sample",
    "StageProgress",
    "StandardLibraryText",
    "TextSource",
    "Verification",
    "build_genesis",
    "read_report",
    "read_status",
    "verify",
    "verify_folder",
]
