"""Gossip messages: their encoding, and the bounded memory of seen, kept and missing messages.

Nodes send small items one after the other on a stream; the kind of an item bounds its size:

    kind u8 | length u24 | topic (8 bytes) | payload

The topic is a hash of its name, and a message id is a hash of topic and content. Therefore no node can give one
message the id of another.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from types import MappingProxyType
from typing import NewType

from blake3 import blake3

from neuroshard.errors import NeuroShardError
from neuroshard.network.transport import MAX_GOSSIP_BYTES
from neuroshard.types import NodeId

TopicId = NewType("TopicId", bytes)
MessageId = NewType("MessageId", bytes)

TOPIC_BYTES = 8
ID_BYTES = 12
MAX_IDS = 256  # in one item
_HEAD = Struct("!BBH8s")  # kind, high byte and low half of the length, topic
HEAD_BYTES = _HEAD.size


class MalformedGossipError(NeuroShardError):
    """Bytes that are not a gossip item."""


class ItemKind(IntEnum):
    """The kind of an item."""

    SUBSCRIBE = 1
    UNSUBSCRIBE = 2
    MESSAGE = 3
    HAVE = 4  # ids of messages that the sender has
    WANT = 5  # ids of messages that the sender requests
    GRAFT = 6  # the sender will forward messages to the receiver, and asks for the same
    PRUNE = 7  # the sender stops forwarding
    CHOKE = 8  # the sender gets messages sooner over other links: send it only ids
    UNCHOKE = 9


_MOST: Mapping[ItemKind, int] = MappingProxyType(
    {ItemKind.MESSAGE: 1 + MAX_GOSSIP_BYTES, ItemKind.HAVE: MAX_IDS * ID_BYTES, ItemKind.WANT: MAX_IDS * ID_BYTES}
)


@dataclass(frozen=True, slots=True)
class Item:
    """One statement about one topic."""

    kind: ItemKind
    topic: TopicId
    payload: bytes = field(default=b"", repr=False)

    def encode(self) -> bytes:
        """The encoded item, as read by ItemReader."""
        size = len(self.payload)
        return _HEAD.pack(self.kind, size >> 16, size & 0xFFFF, self.topic) + self.payload

    @property
    def byte_count(self) -> int:
        return HEAD_BYTES + len(self.payload)

    def ids(self) -> tuple[MessageId, ...]:
        """The message ids of a HAVE or WANT."""
        data = self.payload
        return tuple(MessageId(data[start : start + ID_BYTES]) for start in range(0, len(data), ID_BYTES))


def topic_id(topic: str) -> TopicId:
    """A topic's name on the wire, 8 bytes."""
    return TopicId(blake3(b"neuroshard/gossip/topic/1\0" + topic.encode()).digest(TOPIC_BYTES))


def message_id(topic: TopicId, data: bytes) -> MessageId:
    """Hash of topic and content, 12 bytes."""
    return MessageId(blake3(topic + data).digest(ID_BYTES))


def packed(data: bytes) -> bytes:
    """The message as it travels: deflated if that is shorter, as for signed claims with their hex digits."""
    deflated = zlib.compress(data, wbits=-zlib.MAX_WBITS)
    return b"\1" + deflated if len(deflated) < len(data) else b"\0" + data


def unpacked(payload: bytes) -> bytes:
    """Reverse `packed`. Raises MalformedGossipError, also for more than MAX_GOSSIP_BYTES."""
    if payload[:1] == b"\0":
        return payload[1:]
    if payload[:1] != b"\1":
        raise MalformedGossipError("A message starts with an unknown byte.")
    reader = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        data = reader.decompress(payload[1:], MAX_GOSSIP_BYTES)
    except zlib.error as error:
        raise MalformedGossipError(f"A message cannot be inflated: {error}.") from None
    if not reader.eof or reader.unused_data:
        raise MalformedGossipError("A message is too long or incomplete.")
    return data


def id_items(kind: ItemKind, topic: TopicId, ids: Iterable[MessageId]) -> Iterator[Item]:
    """HAVE or WANT items for any number of ids."""
    listed = tuple(ids)
    for start in range(0, len(listed), MAX_IDS):
        yield Item(kind, topic, b"".join(listed[start : start + MAX_IDS]))


class ItemReader:
    """Splits a byte stream into items. Keeps at most one unfinished item."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Item]:
        """The items that the data completes. Raises MalformedGossipError; the reader cannot be used after that."""
        self._buffer += data
        items: list[Item] = []
        position = 0
        while len(self._buffer) - position >= HEAD_BYTES:
            kind, size, topic = _head(self._buffer, position)
            end = position + HEAD_BYTES + size
            if len(self._buffer) < end:
                break
            payload = bytes(self._buffer[position + HEAD_BYTES : end])
            position = end
            items.append(Item(kind, topic, payload))
        del self._buffer[:position]
        return items


def _head(buffer: bytearray, position: int) -> tuple[ItemKind, int, TopicId]:
    number, high, low, topic = _HEAD.unpack_from(buffer, position)
    size = (high << 16) | low
    try:
        kind = ItemKind(number)
    except ValueError:
        raise MalformedGossipError(f"Gossip of kind {number} is unknown.") from None
    if size > _MOST.get(kind, 0):
        raise MalformedGossipError(f"Gossip of kind {kind.name} has {size} bytes; {_MOST.get(kind, 0)} are allowed.")
    if kind in {ItemKind.HAVE, ItemKind.WANT} and size % ID_BYTES:
        raise MalformedGossipError(f"{size} bytes are not a list of message ids.")
    return kind, size, TopicId(topic)


SEEN_SECONDS = 120.0  # minimum age to forget an id; it is remembered at most twice as long
SEEN_BYTES = 4 * 1024 * 1024
SEEN_ID_BYTES = 128  # memory of one remembered id, an upper estimate
KEPT_SECONDS = 30.0  # how long a message is available on request
MAX_KEPT_BYTES = 8 * 1024 * 1024
ENTRY_BYTES = 512  # overhead per kept message, an upper estimate
MISSING_BYTES = 4 * 1024 * 1024
MISSING_ID_BYTES = 1024  # memory of one missing id with the peers that have it, an upper estimate
MAX_ASKED = 5  # peers to ask, one after the other, for one missing message


class SeenIds:
    """Ids of the newest messages, in two generations."""

    def __init__(self, max_bytes: int = SEEN_BYTES) -> None:
        self._most = max_bytes // SEEN_ID_BYTES // 2
        self._young: set[MessageId] = set()
        self._old: set[MessageId] = set()
        self._since = 0.0

    def __contains__(self, message: MessageId) -> bool:
        return message in self._young or message in self._old

    def add(self, message: MessageId, now: float) -> None:
        """Remember an id."""
        if len(self._young) >= self._most or now - self._since > SEEN_SECONDS:
            self._old, self._young, self._since = self._young, set(), now
        self._young.add(message)


@dataclass(frozen=True)
class KeptMessage:
    """A message that can still be sent on request."""

    topic: TopicId
    data: bytes = field(repr=False)
    kept_at: float


class KeptMessages:
    """The newest messages, bounded in age and in bytes."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._messages: OrderedDict[MessageId, KeptMessage] = OrderedDict()
        self._max_bytes = max_bytes
        self._bytes = 0

    def add(self, message: MessageId, kept: KeptMessage) -> None:
        """Keep a message; the oldest ones are dropped for it."""
        if message not in self._messages:
            self._messages[message] = kept
            self._bytes += ENTRY_BYTES + len(kept.data)
        while self._bytes > self._max_bytes:
            self._drop_oldest()

    def get(self, message: MessageId) -> KeptMessage | None:
        """The message, while it is kept."""
        return self._messages.get(message)

    def younger_than(self, moment: float, topic: TopicId) -> list[MessageId]:
        """Ids of a topic's messages that arrived after a time, the newest first."""
        found: list[MessageId] = []
        for message, kept in reversed(self._messages.items()):
            if kept.kept_at <= moment:
                break
            if kept.topic == topic:
                found.append(message)
        return found

    def expire(self, now: float) -> None:
        """Drop messages that are too old."""
        while self._messages and now - next(iter(self._messages.values())).kept_at > KEPT_SECONDS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, kept = self._messages.popitem(last=False)
        self._bytes -= ENTRY_BYTES + len(kept.data)


@dataclass
class _Missing:
    topic: TopicId
    heard_at: float
    holders: list[NodeId]
    asked: int = 0


class MissingMessages:
    """Messages whose ids peers have announced and that have not arrived."""

    def __init__(self, max_bytes: int = MISSING_BYTES) -> None:
        self._most = max_bytes // MISSING_ID_BYTES
        self._missing: OrderedDict[MessageId, _Missing] = OrderedDict()

    def __len__(self) -> int:
        return len(self._missing)

    def hear(self, message: MessageId, topic: TopicId, holder: NodeId, now: float) -> None:
        """Record that a peer has this message."""
        known = self._missing.setdefault(message, _Missing(topic, now, []))
        if holder not in known.holders and len(known.holders) < MAX_ASKED:
            known.holders.append(holder)
        while len(self._missing) > self._most:
            self._missing.popitem(last=False)

    def arrived(self, message: MessageId) -> None:
        """Remove a message that arrived."""
        self._missing.pop(message, None)

    def due(self, before: float) -> list[tuple[NodeId, TopicId, MessageId]]:
        """The requests due now for messages missing since `before`, one peer each. Every peer is asked once."""
        asking: list[tuple[NodeId, TopicId, MessageId]] = []
        for message, missing in tuple(self._missing.items()):
            if missing.heard_at > before:
                continue
            if missing.asked >= len(missing.holders):
                del self._missing[message]
                continue
            asking.append((missing.holders[missing.asked], missing.topic, message))
            missing.asked += 1
        return asking
