"""Decoders of declared types, which any thread may ask for at any time.

msgspec analyses a struct when a decoder or `msgspec.convert` first needs it, and attaches the analysis to the class
before it is complete, so that a struct can contain itself. While that analysis runs Python code (the annotations are
evaluated), another thread that reads the same struct finds the incomplete one and dereferences a null pointer: the
process dies with a segmentation fault. Seen in msgspec 0.22.0, in a node that started while other nodes wrote to it.

So one lock covers every analysis, also that of different types, which may contain the same struct. No other module
creates a decoder, and all types given to `msgspec.convert` pass through `analysed`.
"""

from __future__ import annotations

import re
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


def read_json(data: bytes, form: type[T], max_bytes: int) -> T:
    """Read JSON of type `form` from strangers.

    Raises ValueError that names the field, for example `$.size`, and quotes no value.
    """
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes of JSON, at most {max_bytes} are allowed")
    try:
        return cast("T", json_decoder(form).decode(data))
    except (ValueError, RecursionError) as error:  # ValidationError, DecodeError; text that is not UTF-8
        raise ValueError(fault_of(error, form)) from None


# msgspec quotes a wrong value or an unknown field before the path. The quoted text is the sender's and may look like a
# path, so only the end of the message counts as one.
_PATH = re.compile(r" - at (?:`key` in )?`\$[^`]*`\Z")
_QUOTED_VALUE = re.compile(r"\A(Invalid (?:enum )?value) .*", re.DOTALL)
_MAX_FAULT_CHARACTERS = 160


def fault_of(error: ValueError | RecursionError, form: Any) -> str:
    """Return an error of msgspec with the name of the faulty field, `$.tokens` for `$[3]`, and no value of the sender.

    Characters that are not printable ASCII become question marks.
    """
    found = _PATH.search(text := str(error))
    fault, path = (text[: found.start()], found[0]) if found else (text, "")
    settings = getattr(form, "__struct_config__", None)
    names: tuple[str, ...] = form.__struct_fields__ if settings is not None and settings.array_like else ()
    position = re.search(r"`\$\[([0-9]{1,4})\]", path)
    if position and int(position[1]) < len(names):
        path = f"{path[: position.start()]}`$.{names[int(position[1])]}{path[position.end() :]}"
    return re.sub(r"[^ -~]", "?", _QUOTED_VALUE.sub(r"\1", fault)[:_MAX_FAULT_CHARACTERS]) + path
