"""Access to the API: the secret and the keys derived from it, the page that opens a session, each request's decision.

The decision is pure: it depends only on the headers of one request and the time."""

from __future__ import annotations

import hashlib
import hmac
import html
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, Final

from neuroshard.api.address import HostPolicy, origin_of
from neuroshard.api.problems import AccessDeniedError, MissingSecretError
from neuroshard.config.folders import NodePaths
from neuroshard.config.state_file import write_atomically
from neuroshard.errors import StorageError
from neuroshard.types import is_loopback

SESSION_SECONDS: Final = 7 * 86_400
LONGEST_COOKIE: Final = 200


@dataclass(frozen=True)
class SessionKeys:
    """Makes and checks cookies, CSRF tokens, entry keys and the read token. A new API secret ends all of them."""

    secret: str
    port: int

    @property
    def cookie_name(self) -> str:
        """Name of the session cookie. It contains the port, because all ports of a host share their cookies."""
        return f"neuroshard_session_{self.port}"

    def is_secret(self, candidate: str) -> bool:
        """Whether the candidate is the API secret, compared in constant time."""
        return hmac.compare_digest(self.secret.encode(), candidate.encode("utf-8", "replace"))

    def new_cookie(self, origin: str, now: float) -> str:
        """Make a cookie value that is valid for pages of exactly this origin, for SESSION_SECONDS."""
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
        """CSRF token of a session. Only a page that may read this node's responses can know it."""
        return self._seal("csrf", cookie)

    def accepts_csrf(self, cookie: str, token: str) -> bool:
        """Whether the CSRF token belongs to the cookie, compared in constant time."""
        return hmac.compare_digest(self.csrf_token(cookie).encode(), token.encode("utf-8", "replace"))

    @property
    def read_token(self) -> str:
        """Token for programs that only read, such as Prometheus. It is the same until the secret changes."""
        return f"read-{self._seal('read')}"

    def is_read_token(self, candidate: str) -> bool:
        """Whether the candidate is the read token, compared in constant time."""
        return hmac.compare_digest(self.read_token.encode(), candidate.encode("utf-8", "replace"))

    def new_entry_key(self, now: float, seconds: int) -> str:
        """Make a key that opens a session instead of the secret, valid for this number of seconds."""
        expiry, nonce = str(int(now) + seconds), secrets.token_urlsafe(16)
        return f"{expiry}.{nonce}.{self._seal('entry', expiry, nonce)}"

    def entry_expiry(self, key: str, now: float) -> int | None:
        """Expiry of an entry key in seconds since the epoch; None for an expired key or one of another secret."""
        parts = key.split(".")
        if len(key) > LONGEST_COOKIE or len(parts) != 3 or not (parts[0].isascii() and parts[0].isdigit()):
            return None
        expiry, nonce, seal = parts
        genuine = hmac.compare_digest(self._seal("entry", expiry, nonce).encode(), seal.encode())
        return int(expiry) if genuine and now < int(expiry) else None

    def _seal(self, *parts: str) -> str:
        """HMAC-SHA256 under the secret, in hex. The length prefixes keep ("a", "bc") and ("ab", "c") apart."""
        key = hashlib.sha256(b"neuroshard/api-session" + self.secret.encode()).digest()
        message = b"".join(len(part := text.encode()).to_bytes(4) + part for text in parts)
        return hmac.new(key, message, hashlib.sha256).hexdigest()


READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
FORM_TYPES = frozenset({"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})
SESSION_PATH = "/api/session"
CSRF_HEADER = "x-neuroshard-csrf"
PUBLIC_NUMBERS = frozenset({"/api/training/verify", "/api/training/global"})
OWNERS_READING = frozenset({"/api/machines", "/api/model-tokens"})  # other computers, programs: not for the read token
MODEL_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/models"})
MODEL_PATH_PREFIX = "/v1/models/"
HOW_TO_ENTER = "Run `neuroshard open`: it opens the dashboard with a new key."
HOW_TO_AUTHORISE = (
    "Send `Authorization: Bearer SECRET`; the secret is in the file api-secret in the node's data folder. "
    "In a browser, run `neuroshard open`."
)
HOW_TO_ASK_THE_MODEL = "`neuroshard token model NAME` makes a model token. Send `Authorization: Bearer TOKEN`."


@dataclass(frozen=True)
class RequestFacts:
    """The parts of a request that decide about access; header names are in lower case."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    is_local: bool = False  # sent from this computer

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> RequestFacts:
        """Read the facts of an ASGI request."""
        headers = tuple((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
        client = scope.get("client")
        return cls(scope["method"], scope["path"], headers, client is not None and is_loopback(client[0]))

    def all(self, name: str) -> list[str]:
        """Every value of a header; `name` is in lower case."""
        return [value for key, value in self.headers if key == name]

    def one(self, name: str) -> str | None:
        """The only value of a header; None if it is absent or occurs more than once."""
        values = self.all(name)
        return values[0] if len(values) == 1 else None

    @property
    def reads_only(self) -> bool:
        """Whether the method is one that changes nothing."""
        return self.method in READING_METHODS

    @property
    def is_for_model(self) -> bool:
        """Whether the path is one that programs call to use the model."""
        return self.path in MODEL_PATHS or self.path.startswith(MODEL_PATH_PREFIX)

    @property
    def bearer(self) -> str | None:
        """The secret in the Authorization header; None without one."""
        scheme, _, value = (self.one("authorization") or "").partition(" ")
        return value.strip() if scheme.lower() == "bearer" else None

    def cookie(self, name: str) -> str | None:
        """The value of a cookie; None if it is absent or the header cannot be parsed."""
        try:
            cookies = SimpleCookie(self.one("cookie") or "")
        except CookieError:
            return None  # a damaged header counts as absent: the caller then asks for the secret
        return cookies[name].value if name in cookies else None


def _no_token(_candidate: str) -> bool:
    """Accept no model token: the server has no model."""
    return False


@dataclass(frozen=True)
class AccessPolicy:
    """Decides which requests one server accepts.

    A request that changes something needs the secret, or a session in the dashboard's own page with its CSRF token. A
    request that reads needs the secret, a session or the read token, except for public paths and, from this computer,
    public numbers; the read token does not open the paths in OWNERS_READING. A model token opens the routes of the
    model, for reading and for completions, and nothing else. Requests from foreign pages, or for a host name that is
    not this node's, are always refused.
    """

    hosts: HostPolicy
    sessions: SessionKeys
    public_paths: frozenset[str]  # the dashboard's own files and /health
    is_setup: bool = False  # the wizard shows a new wallet: it has no public numbers and no read token
    is_model_token: Callable[[str], bool] = _no_token  # may raise StorageError

    @classmethod
    def for_server(
        cls,
        host: str,
        port: int,
        secret: str,
        files: Iterable[str],
        *,
        is_setup: bool = False,
        is_model_token: Callable[[str], bool] = _no_token,
    ) -> AccessPolicy:
        """Make the policy of a server bound to `host` and `port`; `files` are the paths of the dashboard's files."""
        hosts = HostPolicy.for_host(host, port)
        return cls(hosts, SessionKeys(secret, port), frozenset({"/health", *files}), is_setup, is_model_token)

    def check(self, request: RequestFacts, now: float) -> bool:
        """Return whether the request has a key; one without a key is allowed only where the answer is public.

        Raises AccessDeniedError (403) or MissingSecretError (401) for a request that is not allowed.
        """
        origin = self._own_origin(request)
        self._refuse_foreign_page(request, origin)
        if self._is_model_program(request):
            return True
        if request.reads_only:
            is_reader = self._is_reader(request) and request.path not in OWNERS_READING
            may_read = is_reader or self.is_owner(request, now)
            if not (may_read or self._is_public(request)):
                raise _refused_key(request)
            return may_read
        if request.path == SESSION_PATH:
            self._refuse_form(request)
            return False  # the key is in the body; the route compares it
        self._require_owner(request, origin, now)
        return True

    def is_owner(self, request: RequestFacts, now: float) -> bool:
        """Whether the request has the secret or a valid session. A wrong bearer secret fails despite a session."""
        if request.bearer is not None:
            return self.sessions.is_secret(request.bearer)
        cookie = request.cookie(self.sessions.cookie_name)
        host = request.one("host")
        return cookie is not None and host is not None and self.sessions.accepts(cookie, origin_of(host), now)

    def _is_reader(self, request: RequestFacts) -> bool:
        """Whether the request has the read token, which opens no session."""
        return (
            request.bearer is not None
            and not self.is_setup
            and request.path != SESSION_PATH
            and self.sessions.is_read_token(request.bearer)
        )

    def _is_model_program(self, request: RequestFacts) -> bool:
        """Whether the request is for the model and has a model token."""
        return request.is_for_model and request.bearer is not None and self.is_model_token(request.bearer)

    def _is_public(self, request: RequestFacts) -> bool:
        """Whether everybody who reaches the server may read this path, or every program of this computer."""
        is_number = request.path in PUBLIC_NUMBERS and not self.is_setup
        return request.path in self.public_paths or (is_number and request.is_local)

    def _own_origin(self, request: RequestFacts) -> str:
        """Origin of pages under the request's Host. Raises AccessDeniedError if it does not name this node."""
        host = request.one("host")
        if host is None or not self.hosts.allows(host):
            raise AccessDeniedError("The Host header does not name this node.", f"Use {self.hosts.url}/.")
        return origin_of(host)

    def _refuse_foreign_page(self, request: RequestFacts, origin: str) -> None:
        """Raise AccessDeniedError for a request that a page of another origin caused. Following a link is allowed."""
        if any(value.lower() != origin for value in request.all("origin")):
            raise AccessDeniedError("Pages of another origin may not use this node.")
        if request.one("sec-fetch-site") in {"cross-site", "same-site"}:
            follows_link = request.one("sec-fetch-mode") == "navigate" and request.one("sec-fetch-dest") == "document"
            if not (follows_link and request.method == "GET"):
                raise AccessDeniedError("Pages of another site may not use this node.")

    def _refuse_form(self, request: RequestFacts) -> None:
        """Raise AccessDeniedError for a body that a plain HTML form can send: browsers send it across origins."""
        kind = (request.one("content-type") or "").partition(";")[0].strip().lower()
        if kind in FORM_TYPES:
            raise AccessDeniedError("Forms are refused.", "Send JSON.")

    def _require_owner(self, request: RequestFacts, origin: str, now: float) -> None:
        """Raise unless the request has the secret, or comes from the dashboard's own page in a valid session."""
        if request.bearer is not None:
            if not self.sessions.is_secret(request.bearer):
                raise _refused_key(request)
            return
        self._refuse_form(request)
        cookie = request.cookie(self.sessions.cookie_name)
        if cookie is None:
            raise _refused_key(request)
        if request.one("origin") is None:
            raise AccessDeniedError("A session works only in the dashboard's own page.", HOW_TO_AUTHORISE)
        if not self.sessions.accepts(cookie, origin, now):
            raise MissingSecretError("The session is not valid or has ended.", HOW_TO_ENTER)
        if not self.sessions.accepts_csrf(cookie, request.one(CSRF_HEADER) or ""):
            raise AccessDeniedError("The X-NeuroShard-CSRF header is missing or wrong.", "Reload the dashboard.")


def _refused_key(request: RequestFacts) -> MissingSecretError:
    """Make the answer to a request whose key is missing or does not open the call, in words that fit what it sent."""
    if request.is_for_model:
        if request.bearer is None:
            return MissingSecretError("This call needs a model token or the API secret.", HOW_TO_ASK_THE_MODEL)
        sent = "The key of this call is not a model token or the API secret: it is wrong, or was removed."
        return MissingSecretError(sent, HOW_TO_ASK_THE_MODEL)
    if request.bearer is None:
        return MissingSecretError("This call needs a session or the API secret.", HOW_TO_AUTHORISE)
    return MissingSecretError("The key of this call is wrong, or does not open this call.", HOW_TO_AUTHORISE)


SECRET_BYTES = 32
SHORTEST_CHARACTERS = 32
LONGEST_CHARACTERS = 200


def load_or_create_secret(data_dir: Path) -> str:
    """Read the secret in `<data-dir>/api-secret` (mode 0600); create it if it is missing.

    Raises StorageError when the file cannot be read or written, or does not contain a secret.
    """
    path = NodePaths.below(data_dir).api_secret
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path, secrets.token_urlsafe(SECRET_BYTES))
        return _read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"The API secret {path} cannot be used: {error}.", "Check the folder's rights.") from error


def _create(path: Path, secret: str) -> None:
    """Write the file completely or not at all. If two processes start at once, the first one's secret stays."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secret + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike a rename, a link never replaces the secret of another start
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> str:
    """Read the stored secret and make its file private. Raises StorageError if its length is wrong."""
    if os.name == "posix" and path.stat().st_mode & 0o077:
        path.chmod(0o600)
    with path.open(encoding="ascii") as file:
        secret = file.read(LONGEST_CHARACTERS + 2).strip()
    if not SHORTEST_CHARACTERS <= len(secret) <= LONGEST_CHARACTERS:
        raise StorageError(f"The API secret {path} is damaged.", "Delete the file; the next start makes a new one.")
    return secret


ENTRY_SECONDS = 600
FRAGMENT = "key="  # after the # of an address: browsers never send it, so no server logs it
ENTRANCE_FILE = "dashboard.html"  # below the data folder
ENTRANCE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark"><meta http-equiv="refresh" content="0; url={address}">
<title>NeuroShard</title></head><body>
<p><a href="{address}">Open the dashboard of NeuroShard</a></p>
<p>This page works once, within ten minutes. For a new one, run <code>neuroshard open</code>.</p>
</body></html>
"""


class EntryKeys:
    """Accepts every entry key once: used keys are remembered until they expire. Only one event loop may use it."""

    def __init__(self, sessions: SessionKeys) -> None:
        self._sessions = sessions
        self._used: dict[str, int] = {}  # expiry of each used key, seconds since the epoch

    def admit(self, key: str, now: float) -> bool:
        """Whether the key is valid and was not used before. It counts as used from now on."""
        self._used = {known: expiry for known, expiry in self._used.items() if expiry > now}
        expiry = self._sessions.entry_expiry(key, now)
        if expiry is None or key in self._used:
            return False
        self._used[key] = expiry
        return True


@dataclass(frozen=True)
class Entrance:
    """The owner's way into the dashboard: it opens one session, within ENTRY_SECONDS."""

    address: str  # with the key
    page: Path  # forwards to the address, so that the key is in no command line; mode 0600


def new_entrance(data_dir: Path, url: str, now: float) -> Entrance:
    """Make a key to the dashboard at `url`, and write its page into the data folder. It needs only the API secret.

    Raises StorageError.
    """
    key = SessionKeys(load_or_create_secret(data_dir), port=0).new_entry_key(now, ENTRY_SECONDS)
    entrance = Entrance(f"{url}/#{FRAGMENT}{key}", data_dir / ENTRANCE_FILE)
    try:
        write_atomically(entrance.page, ENTRANCE.format(address=html.escape(entrance.address)).encode())
    except OSError as error:
        action = "Free some space, or check the folder's rights."
        raise StorageError(f"{entrance.page} cannot be written: {error.strerror}.", action) from error
    return entrance
