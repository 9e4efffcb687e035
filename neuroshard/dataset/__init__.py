"""Building, verifying and serving Genesis data sets. Training on a data set needs only the `data` room."""

from neuroshard.dataset.build import BuildOptions, BuiltGenesis, build_genesis
from neuroshard.dataset.build_folder import BuildReport, read_report
from neuroshard.dataset.build_text import Document, FolderText, StageProgress, StandardLibraryText, TextSource
from neuroshard.dataset.server import GenesisServer
from neuroshard.dataset.status import DataSetStatus, read_status
from neuroshard.dataset.verification import Verification, VerificationSample, verify_data_set, verify_folder

__all__ = [
    "BuildOptions",
    "BuildReport",
    "BuiltGenesis",
    "DataSetStatus",
    "Document",
    "FolderText",
    "GenesisServer",
    "StageProgress",
    "StandardLibraryText",
    "TextSource",
    "Verification",
    "VerificationSample",
    "build_genesis",
    "read_report",
    "read_status",
    "verify_data_set",
    "verify_folder",
]
