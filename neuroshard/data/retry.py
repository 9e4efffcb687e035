"""How long to wait before asking a data source again, and the failures that decide it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from neuroshard.errors import DataError, DataUnavailableError


class FileMissingError(DataUnavailableError):
    """The source answers, but does not have this file."""


class FileUnchangedError(DataError):
    """The file still is the one that was known already: nothing to fetch."""


class FileDamagedError(DataError):
    """The source gave something that is not the file it should be."""


class SourceBusyError(DataUnavailableError):
    """The source asks for patience."""

    def __init__(self, message: str, retry_after_seconds: float | None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True)
class RetryPolicy:
    """Times of the data client, in seconds unless the name says otherwise."""

    first_seconds: float = 0.5
    longest_seconds: float = 60.0
    stall_seconds: float = 30.0  # an attempt must gain `progress_bytes` in this time
    progress_bytes: int = 16 * 1024


DEFAULT_RETRY_POLICY = RetryPolicy()


def retry_delay(policy: RetryPolicy, failures: int, rng: Random, at_least: float = 0.0) -> float:
    """Seconds to wait after `failures` failures in a row without progress; 0 means that the last attempt gained bytes.

    Half of min(longest, first * 2**(failures - 1)) plus a random share of the other half, so that nodes which lost the
    source together do not return together; never shorter than what the source asked for, within the longest.
    """
    exponent = min(failures - 1, 30)
    bound = min(policy.longest_seconds, policy.first_seconds * 2**exponent) if failures else policy.first_seconds / 8
    return max(bound * (0.5 + 0.5 * rng.random()), min(at_least, policy.longest_seconds))
