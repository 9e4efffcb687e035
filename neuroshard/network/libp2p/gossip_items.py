"""What gossiping nodes say to each other: small items, one after the other on a stream, each bounded by its kind.

kind u8 | length u24 | topic (8 bytes) | payload. A topic travels as a hash of its name, a message id is a hash of topic
and content: so nobody can give one message another's id.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from types import MappingProxyType
from typing import NewType

from blake3 import blake3

from neuroshard.errors import NeuroShardError
from neuroshard.network.transport import MAX_GOSSIP_BYTES

TopicId = NewType("TopicId", bytes)
MessageId = NewType("MessageId", bytes)

TOPIC_BYTES = 8
ID_BYTES = 12
MAX_IDS = 256  # in one item
_HEAD = Struct("!BBH8s")  # kind, high byte and low half of the length, topic
HEAD_BYTES = _HEAD.size


class MalformedGossipError(NeuroShardError):
    """Bytes that are no gossip."""


class ItemKind(IntEnum):
    """What an item says."""

    SUBSCRIBE = 1
    UNSUBSCRIBE = 2
    MESSAGE = 3
    HAVE = 4  # ids of messages that the sender can give
    WANT = 5  # ids of messages that the sender asks for
    GRAFT = 6  # the sender will pass messages on to the receiver, and wants the same
    PRUNE = 7  # the sender stops that
    CHOKE = 8  # the sender gets messages sooner elsewhere: tell it only what there is
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
        """The bytes that ItemReader reads."""
        size = len(self.payload)
        return _HEAD.pack(self.kind, size >> 16, size & 0xFFFF, self.topic) + self.payload

    @property
    def byte_count(self) -> int:
        """Size of the encoded item."""
        return HEAD_BYTES + len(self.payload)

    def ids(self) -> tuple[MessageId, ...]:
        """The message ids of a HAVE or WANT."""
        data = self.payload
        return tuple(MessageId(data[start : start + ID_BYTES]) for start in range(0, len(data), ID_BYTES))


def topic_id(topic: str) -> TopicId:
    """A topic's name as it travels, 8 bytes."""
    return TopicId(blake3(b"neuroshard/gossip/topic/1\0" + topic.encode()).digest(TOPIC_BYTES))


def message_id(topic: TopicId, data: bytes) -> MessageId:
    """Hash of topic and content, 12 bytes."""
    return MessageId(blake3(topic + data).digest(ID_BYTES))


def packed(data: bytes) -> bytes:
    """What travels of a message: deflated where that is shorter, as it is for signed claims with their hex digits."""
    deflated = zlib.compress(data, wbits=-zlib.MAX_WBITS)
    return b"\1" + deflated if len(deflated) < len(data) else b"\0" + data


def unpacked(payload: bytes) -> bytes:
    """The message that `packed` was given. Raises MalformedGossipError, also for more than MAX_GOSSIP_BYTES."""
    if payload[:1] == b"\0":
        return payload[1:]
    if payload[:1] != b"\1":
        raise MalformedGossipError("A message begins with no known byte.")
    reader = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        data = reader.decompress(payload[1:], MAX_GOSSIP_BYTES)
    except zlib.error as error:
        raise MalformedGossipError(f"A message cannot be inflated: {error}.") from None
    if not reader.eof or reader.unused_data:
        raise MalformedGossipError("A message is longer than it may be, or not whole.")
    return data


def id_items(kind: ItemKind, topic: TopicId, ids: Iterable[MessageId]) -> Iterator[Item]:
    """HAVE or WANT items for any number of ids."""
    listed = tuple(ids)
    for start in range(0, len(listed), MAX_IDS):
        yield Item(kind, topic, b"".join(listed[start : start + MAX_IDS]))


class ItemReader:
    """Bytes in any portions in, items out. Holds at most one unfinished item."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Item]:
        """The items that the data completes. Raises MalformedGossipError; nothing can be read after that."""
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
        raise MalformedGossipError(f"There is no gossip of kind {number}.") from None
    if size > _MOST.get(kind, 0):
        raise MalformedGossipError(f"Gossip of kind {kind.name} has {size} bytes; {_MOST.get(kind, 0)} are allowed.")
    if kind in {ItemKind.HAVE, ItemKind.WANT} and size % ID_BYTES:
        raise MalformedGossipError(f"{size} bytes are no list of message ids.")
    return kind, size, TopicId(topic)
