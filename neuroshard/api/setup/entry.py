"""The way into the wizard: a key in the address that the program opens, good for one page and a few minutes."""

from __future__ import annotations

from neuroshard.api.session import SessionKeys

ENTRY_SECONDS = 600
FRAGMENT = "setup-key="  # after the # of an address: never sent, so in no log of a server


class EntryKeys:
    """Keys that were used up are remembered until they have expired; used by one event loop only."""

    def __init__(self, sessions: SessionKeys) -> None:
        self._sessions = sessions
        self._used: dict[str, int] = {}  # to when each would be valid, seconds since the epoch

    def admit(self, key: str, now: float) -> bool:
        """Whether this is a key that nobody has used yet; it is used up now."""
        self._used = {known: expiry for known, expiry in self._used.items() if expiry > now}
        expiry = self._sessions.entry_expiry(key, now)
        if expiry is None or key in self._used:
            return False
        self._used[key] = expiry
        return True


def entry_address(url: str, secret: str, port: int, now: float) -> str:
    """The address that opens the wizard at `url` once; whoever may read the API secret can make one."""
    return f"{url}/#{FRAGMENT}{SessionKeys(secret, port).new_entry_key(now, ENTRY_SECONDS)}"
