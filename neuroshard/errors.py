"""The tree of errors a user can meet. `cli` maps it to exit codes and `api` to HTTP problems, each in one table."""

from __future__ import annotations


class NeuroShardError(Exception):
    """Base of every error that the user sees: what happened, and what to do about it."""

    def __init__(self, message: str, action: str = "") -> None:
        super().__init__(f"{message} {action}".strip())
        self.message = message
        self.action = action


class UsageError(NeuroShardError):
    """A flag, environment variable, configuration key or request body that cannot be used."""


class ContextLengthError(UsageError):
    """A prompt that has more tokens than the model can read at once."""


class TokenError(NeuroShardError):
    """The wallet token is missing, empty or damaged."""


class NetworkRefusedError(NeuroShardError):
    """A port that cannot be bound, or a network that refuses this node."""


class StorageError(NeuroShardError):
    """A folder or file that cannot be read or written."""


class DiskFullError(StorageError):
    """There is not enough space for a write; nothing was lost."""


class UnwritableError(StorageError):
    """A file or folder that cannot be written now: read-only, moved away, not this user's; nothing was lost."""


class DamagedFileError(StorageError):
    """A state file that was read, but does not contain what it should."""


class ConflictError(StorageError):
    """Another process holds or changed what was to be written; nothing was written."""


class CheckpointError(StorageError):
    """A checkpoint that is damaged or does not fit this model."""


class DataError(NeuroShardError):
    """Genesis data that is missing, malformed or does not match its digest or signature."""


class DataUnavailableError(DataError):
    """The data source does not answer now; trying again later may help."""


class TooLittleMemoryError(UsageError):
    """The memory limit cannot hold even the smallest model."""


class NotReadyError(NeuroShardError):
    """The node is still starting or has stopped; the same call may work later."""


class SiteRestartError(NeuroShardError):
    """A rank of a site has ended, and only the launcher that started the ranks can start them again."""


class StoppedError(NeuroShardError):
    """Work that somebody stopped before it was done; the same command resumes it."""
