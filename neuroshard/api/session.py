"""The dashboard's session: a cookie and a CSRF token derived from the API secret, stored nowhere; and entry keys."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final

SESSION_SECONDS: Final = 7 * 86_400
LONGEST_COOKIE: Final = 200


@dataclass(frozen=True)
class SessionKeys:
    """Makes and checks sessions. A new API secret ends all of them."""

    secret: str
    port: int

    @property
    def cookie_name(self) -> str:
        """Cookies are shared by all ports of a host name, therefore the port is part of the name."""
        return f"neuroshard_session_{self.port}"

    def is_secret(self, candidate: str) -> bool:
        """Whether this is the API secret, in constant time."""
        return hmac.compare_digest(self.secret.encode(), candidate.encode("utf-8", "replace"))

    def new_cookie(self, origin: str, now: float) -> str:
        """Value of a cookie for pages of exactly this origin."""
        expiry = int(now) + SESSION_SECONDS
        nonce = secrets.token_urlsafe(16)
        return f"{expiry}.{nonce}.{self._seal('session', origin, str(expiry), nonce)}"

    def accepts(self, cookie: str, origin: str, now: float) -> bool:
        """Whether this node made the cookie for this origin and it has not expired."""
        parts = cookie.split(".")
        if len(cookie) > LONGEST_COOKIE or len(parts) != 3 or not (parts[0].isascii() and parts[0].isdigit()):
            return False
        expiry, nonce, seal = parts
        genuine = hmac.compare_digest(self._seal("session", origin, expiry, nonce).encode(), seal.encode())
        return genuine and now < int(expiry)

    def csrf_token(self, cookie: str) -> str:
        """The token that only a page which may read our answers can know."""
        return self._seal("csrf", cookie)

    def accepts_csrf(self, cookie: str, token: str) -> bool:
        """Whether the token belongs to the cookie, in constant time."""
        return hmac.compare_digest(self.csrf_token(cookie).encode(), token.encode("utf-8", "replace"))

    def new_entry_key(self, now: float, seconds: int) -> str:
        """A key that opens a session instead of the secret, for so long."""
        expiry, nonce = str(int(now) + seconds), secrets.token_urlsafe(16)
        return f"{expiry}.{nonce}.{self._seal('entry', expiry, nonce)}"

    def entry_expiry(self, key: str, now: float) -> int | None:
        """Until when an entry key is valid; None for one that is not ours or has expired."""
        parts = key.split(".")
        if len(key) > LONGEST_COOKIE or len(parts) != 3 or not (parts[0].isascii() and parts[0].isdigit()):
            return None
        expiry, nonce, seal = parts
        genuine = hmac.compare_digest(self._seal("entry", expiry, nonce).encode(), seal.encode())
        return int(expiry) if genuine and now < int(expiry) else None

    def _seal(self, *parts: str) -> str:
        """HMAC-SHA256 under the secret over length-prefixed parts, in hex."""
        key = hashlib.sha256(b"neuroshard/api-session" + self.secret.encode()).digest()
        message = b"".join(len(part := text.encode()).to_bytes(4) + part for text in parts)
        return hmac.new(key, message, hashlib.sha256).hexdigest()
