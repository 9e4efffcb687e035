"""When to dial a peer again, and whether there is hope that it comes back. Pure: no sockets, no clock."""

from __future__ import annotations

from neuroshard.network.pool.errors import ConnectionLostError, DialRefusedError, PeerFullError

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
FULL_PAUSE_SECONDS = 30.0  # when the peer has no room for another connection
REFUSED_SECONDS = 1.0  # nobody has listened for so long where the peer did: its process is gone


class Redialling:
    """What the attempts to connect with one peer told. Times are those of the event loop, in seconds."""

    def __init__(self, resume_seconds: float) -> None:
        """`resume_seconds`: how long to hope for a peer of which nothing is heard."""
        self.dial_after = 0.0
        self._resume_seconds = resume_seconds
        self._failures = 0  # rounds of attempts in a row
        self._left_at: float | None = None  # when a connection ended last; None: nothing to go on with
        self._refused_since: float | None = None
        self._has_listened = False

    def reached(self) -> None:
        """The peer was dialled and greeted."""
        self._failures = 0
        self._refused_since = None
        self._has_listened = True

    def left(self, now: float) -> None:
        """A connection ended, whoever had dialled."""
        self._left_at = now
        self._refused_since = None

    def failed(self, error: ConnectionLostError, now: float) -> None:
        """An attempt failed. That a port is closed tells something only of a peer that could be dialled before."""
        self._failures += now >= self.dial_after  # attempts of one round count once
        if self._has_listened and isinstance(error, DialRefusedError):
            self._refused_since = now if self._refused_since is None else self._refused_since
            if now - self._refused_since >= REFUSED_SECONDS:
                self._left_at = None
        else:
            self._refused_since = None
        self.dial_after = now + self._pause(error, now)

    def is_hopeful(self, now: float) -> bool:
        """Whether the peer was here lately, and its process may still be there and know what was on its way."""
        return self._left_at is not None and now - self._left_at < self._resume_seconds

    def _pause(self, error: ConnectionLostError, now: float) -> float:
        if isinstance(error, PeerFullError):
            return FULL_PAUSE_SECONDS
        if self._refused_since is not None and self.is_hopeful(now):
            return FIRST_PAUSE_SECONDS  # soon it is known whether the process is gone
        return min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 10), LONGEST_PAUSE_SECONDS)
