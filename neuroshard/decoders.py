"""Decoders of declared types, which any thread may ask for at any time.

msgspec analyses a struct when a decoder or `msgspec.convert` first needs it, and attaches the analysis to the class
before it is complete, so that a struct can contain itself. While that analysis runs Python code (the annotations are
evaluated), another thread that reads the same struct finds the incomplete one and dereferences a null pointer: the
process dies with a segmentation fault. Seen in msgspec 0.22.0, in a node that started while other nodes wrote to it.

So one lock covers every analysis, also that of different types, which may contain the same struct. No other module
creates a decoder, and all types given to `msgspec.convert` pass through `analysed`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import RLock
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_ANALYSIS = RLock()


def _cached(function: FunctionT) -> FunctionT:
    """Apply `functools.cache`, which would hide the signature from type checkers."""
    return cast("FunctionT", cache(function))


@_cached
def msgpack_decoder(form: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of MessagePack for a struct, dataclass or other annotation."""
    with _ANALYSIS:
        return msgspec.msgpack.Decoder(form)


@_cached
def json_decoder(form: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of JSON for a struct, dataclass or other annotation."""
    with _ANALYSIS:
        return msgspec.json.Decoder(form)


@_cached
def analysed(form: type[T]) -> type[T]:
    """Return `form`, which any thread may pass to `msgspec.convert` from now on."""
    msgpack_decoder(form)
    return form
