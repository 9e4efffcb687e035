"""Who may do what: a pure decision over the headers of one request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

from neuroshard.api.hosts import HostPolicy, is_loopback, origin_of
from neuroshard.api.problems import AccessDeniedError, MissingSecretError
from neuroshard.api.session import SessionKeys

READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
FORM_TYPES = frozenset({"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})
SESSION_PATH = "/api/session"
CSRF_HEADER = "x-neuroshard-csrf"
HOW_TO_AUTHORISE = (
    "Send `Authorization: Bearer SECRET`; the secret is in the file api-secret in the node's data folder."
)


@dataclass(frozen=True)
class RequestFacts:
    """What the decision rests on; header names in lower case."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestFacts:
        """Facts of an ASGI request."""
        decoded = tuple((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers)
        return cls(method, path, decoded)

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name]

    def one(self, name: str) -> str | None:
        """The only value of a header, None when it is absent or ambiguous."""
        values = self.all(name)
        return values[0] if len(values) == 1 else None

    @property
    def reads_only(self) -> bool:
        """Whether the method promises to change nothing."""
        return self.method in READING_METHODS

    @property
    def bearer(self) -> str | None:
        """The secret in the Authorization header."""
        scheme, _, value = (self.one("authorization") or "").partition(" ")
        return value.strip() if scheme.lower() == "bearer" else None

    def cookie(self, name: str) -> str | None:
        """A cookie's value."""
        try:
            cookies = SimpleCookie(self.one("cookie") or "")
        except CookieError:
            return None  # a damaged header is the same as none: the caller asks for the secret
        return cookies[name].value if name in cookies else None


@dataclass(frozen=True)
class AccessPolicy:
    """The rules of DESIGN 3.2 for one server."""

    hosts: HostPolicy
    sessions: SessionKeys
    secret_for_everything: bool  # the server can be reached from other computers, or shows a new wallet
    public_paths: frozenset[str]  # the dashboard's own files, readable without a secret

    @classmethod
    def for_server(cls, host: str, port: int, secret: str, public_paths: Iterable[str]) -> AccessPolicy:
        """Policy of a server bound to `host` and `port`."""
        hosts = HostPolicy.for_host(host, port)
        return cls(hosts, SessionKeys(secret, port), not is_loopback(host), frozenset({SESSION_PATH, *public_paths}))

    def check(self, request: RequestFacts, now: float) -> None:
        """Let a request pass. Raises AccessDeniedError (403) or MissingSecretError (401)."""
        origin = self._own_origin(request)
        self._refuse_foreign_page(request, origin)
        if request.reads_only:
            if self.secret_for_everything and request.path not in self.public_paths:
                self._require_reader(request, origin, now)
            return
        if request.path == SESSION_PATH:
            self._refuse_form(request)
            return  # the secret is in the body: the route compares it
        self._require_owner(request, origin, now)

    def is_authenticated(self, request: RequestFacts, now: float) -> bool:
        """Whether the request carries the secret or a session."""
        if request.bearer is not None:
            return self.sessions.is_secret(request.bearer)
        cookie = request.cookie(self.sessions.cookie_name)
        host = request.one("host")
        return cookie is not None and host is not None and self.sessions.accepts(cookie, origin_of(host), now)

    def _own_origin(self, request: RequestFacts) -> str:
        """The origin of pages under the request's Host. Raises AccessDeniedError for a name that is not ours."""
        host = request.one("host")
        if host is None or not self.hosts.allows(host):
            raise AccessDeniedError("The Host header does not name this node.", f"Use {self.hosts.url}/.")
        return origin_of(host)

    def _refuse_foreign_page(self, request: RequestFacts, origin: str) -> None:
        """Raise AccessDeniedError for what a page of another origin makes a browser send."""
        if any(value.lower() != origin for value in request.all("origin")):
            raise AccessDeniedError("Pages of another origin may not use this node.")
        if request.one("sec-fetch-site") in {"cross-site", "same-site"}:
            follows_link = request.one("sec-fetch-mode") == "navigate" and request.one("sec-fetch-dest") == "document"
            if not (follows_link and request.method == "GET"):
                raise AccessDeniedError("Pages of another site may not use this node.")

    def _refuse_form(self, request: RequestFacts) -> None:
        """Raise AccessDeniedError for a body that a plain HTML form can send."""
        kind = (request.one("content-type") or "").partition(";")[0].strip().lower()
        if kind in FORM_TYPES:
            raise AccessDeniedError("Forms are refused.", "Send JSON.")

    def _require_reader(self, request: RequestFacts, origin: str, now: float) -> None:
        if request.bearer is not None:
            self._require_secret(request.bearer)
            return
        cookie = request.cookie(self.sessions.cookie_name)
        if cookie is None or not self.sessions.accepts(cookie, origin, now):
            raise MissingSecretError("This node answers only with its API secret.", HOW_TO_AUTHORISE)

    def _require_owner(self, request: RequestFacts, origin: str, now: float) -> None:
        """Raise unless the request carries the secret, or comes from our own page in a session of ours."""
        if request.bearer is not None:
            self._require_secret(request.bearer)
            return
        self._refuse_form(request)
        cookie = request.cookie(self.sessions.cookie_name)
        if cookie is None:
            raise MissingSecretError("This call needs the API secret.", HOW_TO_AUTHORISE)
        if request.one("origin") is None:
            raise AccessDeniedError("A session works only in the dashboard's own page.", HOW_TO_AUTHORISE)
        if not self.sessions.accepts(cookie, origin, now):
            raise AccessDeniedError("The session is not valid or has ended.", "Reload the dashboard.")
        if not self.sessions.accepts_csrf(cookie, request.one(CSRF_HEADER) or ""):
            raise AccessDeniedError("The X-NeuroShard-CSRF header is missing or wrong.", "Reload the dashboard.")

    def _require_secret(self, bearer: str) -> None:
        if not self.sessions.is_secret(bearer):
            raise MissingSecretError("The API secret is wrong.", HOW_TO_AUTHORISE)
