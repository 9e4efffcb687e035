"""Places that Genesis data sets are published to and read from."""

from neuroshard.data.genesis.object_store import Condition, Expected, StoredObject, Version
from neuroshard.genesis.destination.folder import FolderDestination
from neuroshard.genesis.destination.opening import Place, open_destination, open_place
from neuroshard.genesis.destination.protocol import Destination
from neuroshard.genesis.destination.s3 import S3Destination

__all__ = [
    "Condition",
    "Destination",
    "Expected",
    "FolderDestination",
    "Place",
    "S3Destination",
    "StoredObject",
    "Version",
    "open_destination",
    "open_place",
]
