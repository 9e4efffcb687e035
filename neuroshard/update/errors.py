"""Why an update does not happen; the version that is there stays."""

from __future__ import annotations

from neuroshard.errors import NeuroShardError


class UpdateRefusedError(NeuroShardError):
    """What was offered is no update for this computer: unsigned, expired, older, damaged or too large."""


class UpdateFailedError(NeuroShardError):
    """A step of the update did not work here; the version from before is in use."""
