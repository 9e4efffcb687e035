"""Readers of the first bytes of a peer: frames, and the greeting of the pool.

The greeting is between two honest nodes, with a stranger in the middle who changes some bytes.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from struct import Struct
from types import coroutine
from typing import Any, cast

from blake3 import blake3

from neuroshard.identity import NodeKey
from neuroshard.messages import (
    CHUNK_BYTES,
    PREFIX_BYTES,
    Frame,
    FrameDecoder,
    FrameLimits,
    TensorSpec,
    WireError,
    encode,
)
from neuroshard.messages.frame import pack, unpack
from neuroshard.network.pool.options import ConnectionLostError
from neuroshard.network.pool.secure_stream import (
    GreetingVerdict,
    Reception,
    SecureStream,
    Sessions,
    greet_as_dialler,
    greet_as_listener,
)
from neuroshard.types import NodeId
from tests.fuzz.target import Target, golden

LIMITS = FrameLimits(max_header_bytes=16 * 1024, max_body_bytes=4 * CHUNK_BYTES)
EXPECTED = FrameLimits.exactly(TensorSpec("x", "uint8", (2,)))
_PREFIX = Struct("<4sBBBBIQ")


def check_frame(data: bytes) -> None:
    """The first byte sizes the portions; the rest is a stream. All ways of feeding it must agree."""
    if not data:
        return
    stream = data[1:]
    whole = outcome(stream, max(1, len(stream)))
    assert outcome(stream, 1 + data[0]) == whole
    assert received(stream, 1 + data[0]) == whole
    if isinstance(whole, Frame):
        encoded = encode(whole)
        again = encoded.head + b"".join(encoded.body)
        assert outcome(again, len(again)) == whole


def check_sealed_frame(data: bytes) -> None:
    """As `check_frame`, after lengths and digests were made right: what a peer can do that knows the format."""
    check_frame(data[:1] + sealed(data[1:]))


def check_header(data: bytes) -> None:
    """A message that is read can be written and read again; any other bytes are refused."""
    try:
        value = unpack(data)
    except WireError:
        return
    assert repr(unpack(pack(value))) == repr(value)


def limits_of(kind: str) -> FrameLimits:
    """Limits of the fuzzed kinds; one is unknown."""
    if kind == "k":
        return EXPECTED
    if kind.startswith("u"):
        raise KeyError(kind)
    return LIMITS


def outcome(stream: bytes, portion: int) -> Frame | str:
    """The frame at the start of a stream that is fed in portions, or the reason why there is none."""
    decoder = FrameDecoder(limits_of)
    try:
        position = 0
        while position < len(stream) and not decoder.is_complete:
            used = decoder.feed(stream[position : position + portion])
            assert used > 0
            position += used
        return decoder.frame()
    except (WireError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def received(stream: bytes, portion: int) -> Frame | str:
    """As `outcome`, the way a socket would write into the decoder."""
    decoder = FrameDecoder(limits_of)
    try:
        position = 0
        while position < len(stream) and not decoder.is_complete:
            view = decoder.receive_buffer()
            piece = stream[position : position + min(portion, len(view))]
            view[: len(piece)] = piece
            decoder.commit(len(piece))
            position += len(piece)
        return decoder.frame()
    except (WireError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def sealed(data: bytes) -> bytes:
    """A frame whose lengths and digests agree: kind length u8, body length u8, kind, header, body."""
    if len(data) < 2:
        return data
    kind, body = data[2 : 2 + data[0]], data[max(2 + data[0], len(data) - data[1]) :]
    return seal(kind, data[2 + data[0] : len(data) - len(body)], body)


def seal(kind: bytes, header: bytes, body: bytes = b"") -> bytes:
    """A frame of these parts, whatever is in them; its body is at most one chunk."""
    bound = _PREFIX.pack(b"NSHF", 1, 0, len(kind), 0, len(header), len(body)) + kind + header
    bound += blake3(body).digest() if body else b""
    return bound + blake3(bound).digest() + body


def unsealed(stream: bytes) -> bytes:
    """What `sealed` makes this frame of, when its lengths agree and its body is short."""
    _, _, _, kind_bytes, _, header_bytes, body_bytes = _PREFIX.unpack_from(stream)
    head = PREFIX_BYTES + kind_bytes + header_bytes
    body = stream[head + (64 if body_bytes else 32) :]
    return bytes([kind_bytes, len(body) % 256]) + stream[PREFIX_BYTES:head] + body


def frame_seeds() -> tuple[bytes, ...]:
    """Golden frames and golden lies, each with a portion size before it."""
    vectors = golden("wire.json")
    good = [bytes.fromhex(v["head"]) + tensor_bytes(v) for v in vectors["frames"] if "chunks" not in v]
    bad = [bytes.fromhex(v["data"]) for v in vectors["refused"]]
    return tuple(bytes([7 * i % 256]) + stream for i, stream in enumerate([*good, *bad]))


def sealed_frame_seeds() -> tuple[bytes, ...]:
    """The golden frames and lies that have a whole head, in the form that is sealed."""
    return tuple(seed[:1] + unsealed(seed[1:]) for seed in frame_seeds() if len(seed) > PREFIX_BYTES + 32)


def header_seeds() -> tuple[bytes, ...]:
    """The headers of golden frames and lies."""
    found: list[bytes] = []
    for seed in frame_seeds():
        if len(seed) > PREFIX_BYTES:
            _, _, _, kind_bytes, _, header_bytes, _ = _PREFIX.unpack_from(seed, 1)
            start = 1 + PREFIX_BYTES + kind_bytes
            found.append(seed[start : start + header_bytes])
    return tuple(found)


def tensor_bytes(vector: dict[str, Any]) -> bytes:
    """The body of a golden frame."""
    return b"".join(bytes.fromhex(tensor["data"]) for tensor in vector["tensors"])


_MEMORY_BYTES = LIMITS.max_body_bytes + 2_000_000


DIALLER, LISTENER = NodeKey.from_seed(bytes(range(32))), NodeKey.from_seed(bytes(range(1, 33)))
CERTIFICATE = bytes(range(32, 64))
DIALLER_SESSION, LISTENER_SESSION = 5, 6
PROVEN_BY_DIALLER = 5 + 32 + 32 + 64  # opening, nonce, public key, signature; the session follows
PROVEN_BY_LISTENER = 32 + 64  # nonce, signature; verdict and session follow
SESSION_BYTES = 8


class Line:
    """One direction. It is changed by pairs of a position and a mask, both u8."""

    def __init__(self, changes: bytes) -> None:
        self._masks: dict[int, int] = {}
        for position, mask in zip(changes[::2], changes[1::2], strict=False):
            self._masks[position] = self._masks.get(position, 0) ^ mask
        self._arrived = bytearray()
        self._sent = 0
        self.is_closed = False

    def mask(self, position: int) -> int:
        """What this byte is changed with; 0 for one that is not."""
        return self._masks.get(position, 0)

    def is_changed(self, byte_count: int) -> bool:
        """Whether any of the first bytes is."""
        return any(map(self.mask, range(byte_count)))

    def number(self, true: int, position: int) -> int:
        """What a session that was sent at a position is read as."""
        return true ^ sum(self.mask(position + i) << 8 * i for i in range(SESSION_BYTES))

    def send(self, data: bytes) -> None:
        """Bytes, changed on the way."""
        for byte in data:
            self._arrived.append(byte ^ self.mask(self._sent))
            self._sent += 1

    def take(self, count: int) -> bytes | None:
        """The next bytes, None before they are there. Raises ConnectionLostError once they will not come."""
        if len(self._arrived) < count:
            if self.is_closed:
                raise ConnectionLostError("closed")
            return None
        data = bytes(self._arrived[:count])
        del self._arrived[:count]
        return data


class End:
    """One side's stream."""

    def __init__(self, outgoing: Line, incoming: Line) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    async def send_all(self, data: bytes) -> None:
        """To the other side."""
        self._outgoing.send(data)

    async def receive_bytes(self, count: int) -> bytes:
        """From the other side."""
        while (data := self._incoming.take(count)) is None:
            await _pause()
        return data


@coroutine
def _pause() -> Generator[None, None, None]:
    yield


class Side:
    """A greeting under way, and what comes of it."""

    def __init__(self, work: Coroutine[Any, Any, Any], outgoing: Line) -> None:
        self._work = work
        self._outgoing = outgoing
        self.result: Any = None
        self.has_ended = False

    def advance(self) -> None:
        """Until it waits or ends."""
        if self.has_ended:
            return
        try:
            self._work.send(None)
        except StopIteration as ended:
            self.result, self.has_ended = ended.value, True
        except ConnectionLostError:
            self.has_ended = True
        self._outgoing.is_closed = self.has_ended


def check_greeting(data: bytes) -> None:
    """The first byte says how many changes are on the dialler's line. Whoever was changed is not believed."""
    if not data:
        return
    there, back = Line(data[1 : 1 + 2 * data[0]]), Line(data[1 + 2 * data[0] :])
    dialler, listener = greeted(there, back)
    is_proven = not there.is_changed(PROVEN_BY_DIALLER) and not back.is_changed(PROVEN_BY_LISTENER)
    verdict = GreetingVerdict.WELCOME ^ back.mask(PROVEN_BY_LISTENER)
    if is_proven:
        told = there.number(DIALLER_SESSION, PROVEN_BY_DIALLER)
        assert listener == (DIALLER.node_id, Sessions(LISTENER_SESSION, told))
    else:
        assert listener is None
    if is_proven and verdict in tuple(GreetingVerdict):
        assert dialler == Reception(GreetingVerdict(verdict), back.number(LISTENER_SESSION, PROVEN_BY_LISTENER + 1))
    else:
        assert dialler is None


def greeted(there: Line, back: Line) -> tuple[Reception | None, tuple[NodeId, Sessions] | None]:
    """What dialler and listener believe in the end."""
    ends = (cast("SecureStream", End(there, back)), cast("SecureStream", End(back, there)))
    dialler = Side(greet_as_dialler(ends[0], DIALLER, LISTENER.node_id, CERTIFICATE, DIALLER_SESSION), there)
    welcome = Reception(GreetingVerdict.WELCOME, LISTENER_SESSION)
    listener = Side(greet_as_listener(ends[1], LISTENER, CERTIFICATE, lambda _: welcome), back)
    while not (dialler.has_ended and listener.has_ended):
        dialler.advance()
        listener.advance()
    return dialler.result, listener.result


def greeting_seeds() -> tuple[bytes, ...]:
    """Nothing changed, and one change in every part."""
    on_the_way = (0, 5, 40, 70, PROVEN_BY_DIALLER, PROVEN_BY_DIALLER + 7)
    back = (0, 31, 40, PROVEN_BY_LISTENER, PROVEN_BY_LISTENER + 1, PROVEN_BY_LISTENER + 8)
    return (
        b"\0",
        *(bytes([1, position, 1]) for position in on_the_way),
        *(bytes([0, position, 1]) for position in back),
        bytes([2, PROVEN_BY_DIALLER, 3, PROVEN_BY_DIALLER + 1, 4, PROVEN_BY_LISTENER, 3]),
    )


TARGETS = (
    Target("frame", check_frame, frame_seeds, _MEMORY_BYTES),
    Target("sealed-frame", check_sealed_frame, sealed_frame_seeds, _MEMORY_BYTES),
    Target("header", check_header, header_seeds),
    Target("greeting", check_greeting, greeting_seeds, short_inputs=400),
)
