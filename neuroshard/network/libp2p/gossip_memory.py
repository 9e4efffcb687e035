"""What a gossiping node remembers: which messages it has seen, the youngest ones themselves, and those it heard of."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from neuroshard.network.libp2p.gossip_items import MessageId, TopicId
from neuroshard.types import NodeId

SEEN_SECONDS = 120.0  # remembered for at least as long, and at most twice
SEEN_BYTES = 4 * 1024 * 1024
SEEN_ID_BYTES = 128  # that a remembered id takes, rather more than less
KEPT_SECONDS = 30.0  # messages that can be given to whoever asks
MAX_KEPT_BYTES = 8 * 1024 * 1024
ENTRY_BYTES = 512  # that a kept message takes besides its own, rather more than less
MISSING_BYTES = 4 * 1024 * 1024
MISSING_ID_BYTES = 1024  # that an id takes with those who told of it, rather more than less
MAX_ASKED = 5  # peers, one after the other, for one missing message


class SeenIds:
    """Ids of messages that came by, in two generations."""

    def __init__(self, max_bytes: int = SEEN_BYTES) -> None:
        self._most = max_bytes // SEEN_ID_BYTES // 2
        self._young: set[MessageId] = set()
        self._old: set[MessageId] = set()
        self._since = 0.0

    def __contains__(self, message: MessageId) -> bool:
        return message in self._young or message in self._old

    def add(self, message: MessageId, now: float) -> None:
        """Remember one more."""
        if len(self._young) >= self._most or now - self._since > SEEN_SECONDS:
            self._old, self._young, self._since = self._young, set(), now
        self._young.add(message)


@dataclass(frozen=True)
class KeptMessage:
    """A message that can still be given to others."""

    topic: TopicId
    data: bytes = field(repr=False)
    kept_at: float


class KeptMessages:
    """The youngest messages, bounded in age and in bytes."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._messages: OrderedDict[MessageId, KeptMessage] = OrderedDict()
        self._max_bytes = max_bytes
        self._bytes = 0

    def add(self, message: MessageId, kept: KeptMessage) -> None:
        """Keep one more; the oldest make room."""
        if message not in self._messages:
            self._messages[message] = kept
            self._bytes += ENTRY_BYTES + len(kept.data)
        while self._bytes > self._max_bytes:
            self._drop_oldest()

    def get(self, message: MessageId) -> KeptMessage | None:
        """The message, while it is kept."""
        return self._messages.get(message)

    def younger_than(self, moment: float, topic: TopicId) -> list[MessageId]:
        """Ids of a topic's messages that came after a moment, the youngest first."""
        found: list[MessageId] = []
        for message, kept in reversed(self._messages.items()):
            if kept.kept_at <= moment:
                break
            if kept.topic == topic:
                found.append(message)
        return found

    def expire(self, now: float) -> None:
        """Drop what is too old."""
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
    """Messages that others have told of and that have not come."""

    def __init__(self, max_bytes: int = MISSING_BYTES) -> None:
        self._most = max_bytes // MISSING_ID_BYTES
        self._missing: OrderedDict[MessageId, _Missing] = OrderedDict()

    def __len__(self) -> int:
        return len(self._missing)

    def hear(self, message: MessageId, topic: TopicId, holder: NodeId, now: float) -> None:
        """A peer can give this message."""
        known = self._missing.setdefault(message, _Missing(topic, now, []))
        if holder not in known.holders and len(known.holders) < MAX_ASKED:
            known.holders.append(holder)
        while len(self._missing) > self._most:
            self._missing.popitem(last=False)

    def arrived(self, message: MessageId) -> None:
        """It came."""
        self._missing.pop(message, None)

    def due(self, before: float) -> list[tuple[NodeId, TopicId, MessageId]]:
        """Whom to ask now for what has been missing since `before`; every peer is asked once."""
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
