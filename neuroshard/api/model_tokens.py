"""Model tokens: keys for programs that use the model below /v1 and may do nothing else; and their routes.

The node stores only the SHA-256 of a token. A token has 256 random bits, so a slow hash would protect nothing more.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Final

from anyio import to_thread
from fastapi import APIRouter
from msgspec import Meta, Struct
from pydantic import Field

from neuroshard.api.rendering import EncodableText, RequestBody, ResponseBody
from neuroshard.api.requests import CommandBody
from neuroshard.config.state_file import StateFile
from neuroshard.errors import ConflictError, UsageError

TOKENS_FILE: Final = "model-tokens.json"
PREFIX: Final = "model-"
TOKEN_BYTES: Final = 32
MAX_TOKENS: Final = 64
MAX_NAME_CHARACTERS: Final = 40


class StoredToken(Struct, frozen=True):
    """A token as the disk has it: its name, and what recognises it."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    made_at: Annotated[int, Meta(ge=0)]


class StoredTokens(Struct, frozen=True):
    """All model tokens of a node, the oldest first."""

    tokens: Annotated[tuple[StoredToken, ...], Meta(max_length=MAX_TOKENS)] = ()


class ModelTokens:
    """The file `<data-dir>/model-tokens.json`, mode 0600. It is read at each use, so a removal takes effect at once."""

    def __init__(self, data_dir: Path | None = None) -> None:
        """`data_dir` None: the tokens are only in memory."""
        self._memory = StoredTokens()
        self._file: StateFile[StoredTokens] | None = None
        if data_dir is not None:
            then = "programs need new tokens for the model"
            path = data_dir / TOKENS_FILE
            self._file = StateFile(path, StoredTokens, "set_aside", then, max_bytes=50_000, data_dir=data_dir)

    def all(self) -> tuple[StoredToken, ...]:
        """The tokens, the oldest first. Raises StorageError."""
        return (self._memory if self._file is None else self._file.read() or StoredTokens()).tokens

    def add(self, name: str, now: float) -> str:
        """Make a token. Only the result contains it. Raises UsageError, ConflictError or StorageError."""
        name = name.strip()
        if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
            raise UsageError("The token needs a name.", f"Use 1 to {MAX_NAME_CHARACTERS} printable characters.")
        token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
        with self._alone():
            known = self.all()
            if any(one.name == name for one in known):
                raise ConflictError(f"There is a token with the name {name}.", "Remove it first, or use another name.")
            if len(known) >= MAX_TOKENS:
                raise ConflictError(f"There are {MAX_TOKENS} tokens already.", "Remove those that no program uses.")
            self._write((*known, StoredToken(name, _digest(token), int(now))))
        return token

    def remove(self, name: str) -> None:
        """End a token. Raises UsageError if none has this name, or StorageError."""
        with self._alone():
            known = self.all()
            left = tuple(one for one in known if one.name != name.strip())
            if len(left) == len(known):
                raise UsageError("No token has this name.", "`neuroshard token list` shows their names.")
            self._write(left)

    def accepts(self, candidate: str) -> bool:
        """Whether the candidate is one of the tokens. The time does not depend on which. Raises StorageError."""
        if not candidate.startswith(PREFIX):
            return False
        digest, is_known = _digest(candidate), False
        for one in self.all():
            is_known |= hmac.compare_digest(one.digest, digest)
        return is_known

    def _alone(self) -> AbstractContextManager[None]:
        return nullcontext() if self._file is None else self._file.alone()

    def _write(self, tokens: tuple[StoredToken, ...]) -> None:
        self._memory = StoredTokens(tokens)
        if self._file is not None:
            self._file.write(self._memory)


def _digest(token: str) -> str:
    return hashlib.sha256(b"neuroshard/model-token" + token.encode("utf-8", "replace")).hexdigest()


class ModelTokenBody(ResponseBody):
    """A token of a program; the node does not know its text."""

    name: EncodableText
    made_at: int


class ModelTokensBody(ResponseBody):
    """GET /api/model-tokens: the tokens with which programs use the model."""

    tokens: list[ModelTokenBody]


class NewTokenRequest(RequestBody):
    """POST /api/model-tokens: a name for the new token."""

    name: str = Field(max_length=200)  # `ModelTokens.add` decides, in words


class NewTokenBody(ResponseBody):
    """A new token. It is shown only now."""

    name: EncodableText
    token: str


class TokenNameRequest(RequestBody):
    """POST /api/model-tokens/remove: the token to end."""

    name: str = Field(min_length=1, max_length=100)


def model_token_routes(tokens: ModelTokens, state: Callable[[], str], clock: Callable[[], float]) -> APIRouter:
    """Make the routes. The list needs the owner as well: see `OWNERS_READING` in access.py."""
    router = APIRouter(tags=["session"])

    @router.get("/api/model-tokens")
    async def list_tokens() -> ModelTokensBody:
        """The tokens with which programs use the model below /v1, without their text."""
        found = await to_thread.run_sync(tokens.all)
        return ModelTokensBody(tokens=[ModelTokenBody(name=one.name, made_at=one.made_at) for one in found])

    @router.post("/api/model-tokens", status_code=201)
    async def make(body: NewTokenRequest) -> NewTokenBody:
        """Make a token that opens the routes below /v1 and nothing else. Its text is in this response only."""
        token = await to_thread.run_sync(tokens.add, body.name, clock())
        return NewTokenBody(name=body.name.strip(), token=token)

    @router.post("/api/model-tokens/remove", status_code=202)
    async def remove(body: TokenNameRequest) -> CommandBody:
        """End a token. Its program gets 401 from now on."""
        await to_thread.run_sync(tokens.remove, body.name)
        return CommandBody(state=state(), message=f"The token {body.name.strip()} is removed.")

    return router
