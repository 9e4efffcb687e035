"""A Genesis folder behind HTTP: one attempt at one file. The fetcher repeats, resumes and checks.

Redirects are followed within the same host only (and from http to https, never back): the data are verified, but a
redirect could otherwise make this computer call services of its own network.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx

from neuroshard.data.transfer import FileDamagedError, FileMissingError, FileUnchangedError, OpenedFile, SourceBusyError
from neuroshard.errors import DataUnavailableError, UsageError
from neuroshard.types import is_loopback

_MAX_REDIRECTS = 3
_MAX_VALIDATOR_CHARACTERS = 256
_OK, _PARTIAL, _UNCHANGED, _BEYOND_THE_END = 200, 206, 304, 416
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MISSING = frozenset({403, 404, 410})  # object stores answer 403 for a key they do not have
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})")
_ERROR_NUMBER = re.compile(r"\[Errno -?\d+\] ")  # of the operating system; the message repeats it in words
_DIGITS = re.compile(r"\d{1,18}")


class HttpSource:
    """A Genesis folder at an http or https URL. Environment proxies are used, but never to reach this computer.

    `redirect_advice` is the advice in the error for a redirect to another host, which is refused.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 30.0,
        redirect_advice: str = "Give the address it redirects to with --genesis if you trust it.",
    ) -> None:
        self._redirect_advice = redirect_advice
        try:
            self._base = httpx.URL(url.rstrip("/") + "/")
        except httpx.InvalidURL as error:
            raise UsageError(f"{url} is not a valid URL: {error}.") from error
        if not self._base.host or self._base.userinfo or self._base.query or self._base.fragment:
            raise UsageError(f"The URL of {self._base.host or 'the data'} must not contain a user or a query.")
        timeout = httpx.Timeout(timeout_seconds, connect=min(10.0, timeout_seconds))
        try:
            self._client = httpx.AsyncClient(timeout=timeout, trust_env=not _is_here(self._base.host))
        except (ImportError, ValueError) as error:
            raise UsageError(f"The proxy named in the environment cannot be used: {error}") from error

    @property
    def description(self) -> str:
        """The URL."""
        return str(self._base).rstrip("/")

    @asynccontextmanager
    async def open(
        self, name: str, offset: int = 0, validator: str | None = None, known: str | None = None
    ) -> AsyncGenerator[OpenedFile]:
        """Request a file, its rest from `offset` (Range with If-Range), or a newer version than `known`."""
        headers = {"Accept-Encoding": "identity"}  # sizes and offsets must mean stored bytes
        if offset and validator:
            headers |= {"Range": f"bytes={offset}-", "If-Range": validator}
        if known:
            headers |= {"If-None-Match" if known.startswith('"') else "If-Modified-Since": known}
        try:
            response = await self._send(self._base.join(name), headers)
        except httpx.HTTPError as error:
            raise _in_words(self._base.host, error) from error
        except UnicodeError as error:  # a redirect to an invalid host name
            raise DataUnavailableError(f"{self._base.host} redirects to something that is not a URL.") from error
        body = _Body(response)
        try:
            if known and response.status_code == _UNCHANGED:
                raise FileUnchangedError(f"{name} did not change.")
            yield _opened(response, body, name, offset if "Range" in headers else 0)
        finally:
            await body.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _send(self, url: httpx.URL, headers: dict[str, str]) -> httpx.Response:
        for _ in range(_MAX_REDIRECTS + 1):
            response = await self._client.send(self._client.build_request("GET", url, headers=headers), stream=True)
            if response.status_code not in _REDIRECTS:
                return response
            await response.aclose()
            url = self._redirected(url, response.headers.get("location", ""))
        raise DataUnavailableError(f"{self._base.host} redirects in a loop.")

    def _redirected(self, url: httpx.URL, location: str) -> httpx.URL:
        try:
            target = url.join(location)
        except httpx.InvalidURL as error:
            raise DataUnavailableError(f"{self._base.host} redirects to something that is not a URL.") from error
        is_upgrade = (url.scheme, target.scheme) == ("http", "https") and target.host == url.host
        is_same = (target.scheme, target.host, target.port) == (url.scheme, url.host, url.port)
        if not is_same and not is_upgrade:
            raise DataUnavailableError(
                f"{self._base.host} redirects to {target.host or 'nowhere'}, which is refused.",
                self._redirect_advice,
            )
        return target


def _opened(response: httpx.Response, body: _Body, name: str, offset: int) -> OpenedFile:
    """Check status and headers of an answer before its body is read."""
    _refuse_status(response, name, offset)
    if response.headers.get("content-encoding", "identity") != "identity":
        raise FileDamagedError(f"{name} arrived compressed, although it was requested uncompressed.")
    validator = _validator(response)
    length = response.headers.get("content-length", "")
    total = int(length) if _DIGITS.fullmatch(length) else None
    start = 0
    if response.status_code == _PARTIAL:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if match is None or int(match[1]) != offset:
            raise FileDamagedError(f"{name}: the server sent a different part of the file than requested.")
        start, total = offset, int(match[2])
    return OpenedFile(start, total, validator, body)


def _refuse_status(response: httpx.Response, name: str, offset: int) -> None:
    status = response.status_code
    host = response.url.host
    if status == _OK or (status == _PARTIAL and offset):
        return
    if status in _MISSING:
        raise FileMissingError(f"{host} has no {name} (HTTP {status}).")
    if status == _BEYOND_THE_END:
        raise FileDamagedError(f"{name} at {host} is now shorter than the part already downloaded.")
    wait = response.headers.get("retry-after", "")
    raise SourceBusyError(f"{host} answers HTTP {status} for {name}.", float(wait) if _DIGITS.fullmatch(wait) else None)


def _validator(response: httpx.Response) -> str | None:
    """Return a strong ETag, otherwise the date: If-Range allows only these (RFC 9110, 13.1.5)."""
    etag, date = response.headers.get("etag", ""), response.headers.get("last-modified")
    chosen = date if not etag else etag if etag.startswith('"') else None
    is_usable = chosen is not None and chosen.isascii() and len(chosen) <= _MAX_VALIDATOR_CHARACTERS
    return chosen if is_usable else None  # a value that cannot be sent back is not a validator


class _Body:
    """The bytes of an answer, with errors in words.

    It is not a generator: one abandoned half-way would be closed by the garbage collector outside its task.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._raw = response.aiter_raw()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._raw)
        except httpx.HTTPError as error:
            raise _in_words(self._response.url.host, error) from error

    async def aclose(self) -> None:
        # The connection is closed first. The generators inside httpx then fail on it, which is the only way to
        # end all of them.
        await self._response.aclose()
        with suppress(httpx.HTTPError, httpx.StreamError, StopAsyncIteration):
            while True:
                await anext(self._raw)


def _in_words(host: str, error: httpx.HTTPError) -> DataUnavailableError:
    match error:
        case httpx.ConnectTimeout() | httpx.ConnectError():
            what = f"{host} cannot be reached"
        case httpx.TimeoutException():
            what = f"{host} stopped sending"
        case httpx.ProxyError():
            what = f"the proxy for {host} refused"
        case _:
            what = f"the connection to {host} broke"
    detail = _ERROR_NUMBER.sub("", str(error))
    return DataUnavailableError(f"{what} ({detail})." if detail else f"{what}.")


def _is_here(host: str) -> bool:
    return is_loopback(host) or host.endswith(".localhost")
