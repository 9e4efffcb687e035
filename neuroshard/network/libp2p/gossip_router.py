"""The gossip router: gossipsub's mesh with few links per topic. No sockets and no clock, only its own memory.

Every listener keeps links (GRAFT, PRUNE) with a few others. A message first goes over all links. A node that gets it a
second time chokes the link of the second copy, which from then on carries only ids. So the messages settle on a tree
and arrive about once (Leitao et al., "Epidemic Broadcast Trees"; libp2p's episub). Ids repair losses of the tree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from neuroshard.network.libp2p.gossip_messages import (
    Item,
    ItemKind,
    KeptMessage,
    KeptMessages,
    MessageId,
    MissingMessages,
    SeenIds,
    TopicId,
    id_items,
    message_id,
)
from neuroshard.network.limits import TokenBucket
from neuroshard.network.membership_gate import MembershipGate
from neuroshard.types import NodeId

DEGREE, LEAST_DEGREE, MOST_DEGREE = 4, 3, 6  # low: the busiest node of a tree sends one copy over each of its links
LAZY_DEGREE = 1  # peers outside the mesh that get ids at every heartbeat
HEARTBEAT_SECONDS = 1.0
PATIENCE_SECONDS = 0.9  # between the arrival of an id and the request for its message
CHOKE_SHARE = 0.002  # share of the duplicates that close their link, where two links carry messages: see _choked
CHOKE_RISE = 15.0  # multiplier with every further link
MOST_CHOKE_SHARE = 0.5
BACKOFF_SECONDS = 60.0  # after a PRUNE, before the same two nodes try again
MAX_TOPICS_OF_PEER = 64
ITEMS_A_SECOND = 100  # from one peer in the long run; a swarm's reports are ten per second, whatever its size
BYTES_A_SECOND = 256 * 1024
IDS_A_SECOND = 256
GOSSIP_BYTES = 16 * 1024 * 1024  # memory for messages, unless set otherwise
ALLOWANCE_SECONDS = 60.0  # burst: after a stalled connection all queued items arrive together
MAX_GIVEN = 128  # messages sent to one peer on request between two heartbeats

Sends: TypeAlias = list[tuple[NodeId, Item]]
Check: TypeAlias = Callable[[TopicId, NodeId, bytes], bool]


@dataclass
class _Link:
    is_lazy: bool = False  # only ids go over it, in both directions: a shared tree needs links that work both ways
    due: list[MessageId] = field(default_factory=list[MessageId])  # ids to send at the next heartbeat


@dataclass
class _Topic:
    links: dict[NodeId, _Link] = field(default_factory=dict[NodeId, _Link])
    backoff: dict[NodeId, float] = field(default_factory=dict[NodeId, float])  # end of the backoff
    has_made_room: bool = False  # since the last heartbeat


@dataclass
class _Peer:
    topics: set[TopicId] = field(default_factory=set[TopicId])
    items: TokenBucket = field(default_factory=lambda: _for_a_minute(ITEMS_A_SECOND))
    byte_count: TokenBucket = field(default_factory=lambda: _for_a_minute(BYTES_A_SECOND))
    announced_ids: TokenBucket = field(default_factory=lambda: _for_a_minute(IDS_A_SECOND))
    given: int = 0  # since the last heartbeat
    has_flooded: bool = False  # since the last heartbeat


@dataclass(frozen=True)
class ItemOutcome:
    """The result of one item."""

    sends: Sends = field(default_factory=list[tuple[NodeId, Item]])
    delivered: bytes | None = None  # a new message that passed the check
    is_refused: bool = False  # a new message that did not
    is_flood: bool = False  # more than a peer may send; the item is ignored, and reported once between two heartbeats


def _for_a_minute(per_second: float) -> TokenBucket:
    return TokenBucket(ALLOWANCE_SECONDS * per_second, per_second)


def _flood(peer: _Peer) -> ItemOutcome:
    first, peer.has_flooded = not peer.has_flooded, True
    return ItemOutcome(is_flood=first)


class GossipRouter:
    """The gossip decisions of one node."""

    def __init__(self, random: Random, max_bytes: int = GOSSIP_BYTES, gate: MembershipGate | None = None) -> None:
        """Without `gate` every peer is served. A peer that the gate refuses takes no link away from another one."""
        self._random = random
        self._gate = gate or MembershipGate()
        self._peers: dict[NodeId, _Peer] = {}
        self._topics: dict[TopicId, _Topic] = {}
        self._seen = SeenIds(max_bytes // 4)
        self._kept = KeptMessages(max_bytes // 2)
        self._missing = MissingMessages(max_bytes // 4)
        self._last_heartbeat = 0.0
        self.counts: Counter[str] = Counter()  # received items by kind; "duplicate", "refused"

    def links(self, topic: TopicId) -> tuple[NodeId, ...]:
        """This node's links of a topic."""
        known = self._topics.get(topic)
        return tuple(known.links) if known else ()

    def linked_peers(self) -> set[NodeId]:
        """Peers to which this node has a link in any topic."""
        return {peer for topic in self._topics.values() for peer in topic.links}

    # Requests of this node

    def join(self, peer: NodeId) -> Sends:
        """Add a peer that can be reached from now on."""
        self._peers.setdefault(peer, _Peer())
        return [(peer, Item(ItemKind.SUBSCRIBE, topic)) for topic in self._topics]

    def leave(self, peer: NodeId) -> None:
        """Remove a peer that left."""
        self._peers.pop(peer, None)
        for topic in self._topics.values():
            topic.links.pop(peer, None)

    def subscribe(self, topic: TopicId, now: float) -> Sends:
        """Listen to a topic."""
        self._topics.setdefault(topic, _Topic())
        sends: Sends = [(peer, Item(ItemKind.SUBSCRIBE, topic)) for peer in self._peers]
        return sends + self._filled(topic, now)

    def unsubscribe(self, topic: TopicId) -> Sends:
        """Stop listening."""
        if self._topics.pop(topic, None) is None:
            return []
        return [(peer, Item(ItemKind.UNSUBSCRIBE, topic)) for peer in self._peers]  # which also ends links

    def publish(self, topic: TopicId, data: bytes, now: float) -> Sends:
        """Send a message to this node's links. A node that does not listen itself sends it to a few listeners."""
        message = message_id(topic, data)
        self._remember(message, topic, data, now)
        if topic in self._topics and self._served(self._topics[topic].links):
            return self._passed_on(topic, message, data, None)
        listeners = self._listeners(topic)
        chosen = self._random.sample(listeners, min(DEGREE, len(listeners)))
        return [(peer, Item(ItemKind.MESSAGE, topic, data)) for peer in chosen]

    # Items of peers

    def handle(self, peer: NodeId, item: Item, now: float, check: Check) -> ItemOutcome:
        """Process one item of a peer."""
        known = self._peers.setdefault(peer, _Peer())
        if not (known.items.take(now) and known.byte_count.take(now, item.byte_count)):
            return _flood(known)
        self.counts[item.kind.name.lower()] += 1
        if item.kind is ItemKind.MESSAGE:
            return self._handle_message(peer, item, now, check)
        if item.kind in {ItemKind.HAVE, ItemKind.WANT}:
            return self._handle_ids(peer, known, item, now)
        return ItemOutcome(self._handle_link(peer, known, item, now))

    def heartbeat(self, now: float) -> Sends:
        """The work due once per second: links to make or end, ids to send, messages to request."""
        sends: Sends = []
        for peer in self._peers.values():
            peer.given, peer.has_flooded = 0, False
        for topic, known in tuple(self._topics.items()):
            known.has_made_room = False
            sends += self._filled(topic, now) + self._thinned(topic, now) + self._lazy_ids(topic)
        sends += self._asked(now)
        self._kept.expire(now)
        self._last_heartbeat = now
        return sends

    # Messages

    def _handle_message(self, peer: NodeId, item: Item, now: float, check: Check) -> ItemOutcome:
        topic, message = item.topic, message_id(item.topic, item.payload)
        if topic not in self._topics:
            return ItemOutcome()
        if message in self._seen:
            self.counts["duplicate"] += 1
            return ItemOutcome(self._choked(peer, topic))
        self._missing.arrived(message)
        if not check(topic, peer, item.payload):
            self._seen.add(message, now)
            self.counts["refused"] += 1
            return ItemOutcome(is_refused=True)
        self._remember(message, topic, item.payload, now)
        return ItemOutcome(self._passed_on(topic, message, item.payload, peer), delivered=item.payload)

    def _remember(self, message: MessageId, topic: TopicId, data: bytes, now: float) -> None:
        self._seen.add(message, now)
        self._kept.add(message, KeptMessage(topic, data, now))

    def _passed_on(self, topic: TopicId, message: MessageId, data: bytes, received_from: NodeId | None) -> Sends:
        sends: Sends = []
        for peer, link in self._topics[topic].links.items():
            if peer == received_from:
                continue
            if link.is_lazy:
                link.due.append(message)
            else:
                sends.append((peer, Item(ItemKind.MESSAGE, topic, data)))
        return sends

    def _choked(self, peer: NodeId, topic: TopicId) -> Sends:
        """Decide whether to close the link over which a duplicate arrived.

        Not at once: messages under way together would close several links that need each other, and the tree would
        break and be repaired for ever (simulated with 50 and 200 nodes). Sooner at a node with many links: of the
        links that form a circle any one may be closed, and in a tree of equal nodes no node sends more than two
        copies.
        """
        known, link = self._topics[topic], self._link(peer, topic)
        if link is None or link.is_lazy:
            return []
        active = sum(not other.is_lazy for other in known.links.values())
        share = min(CHOKE_SHARE * CHOKE_RISE ** (active - 2), MOST_CHOKE_SHARE)
        if active < 2 or self._random.random() > share:
            return []
        link.is_lazy = True
        return [(peer, Item(ItemKind.CHOKE, topic))]

    def _handle_ids(self, peer: NodeId, known: _Peer, item: Item, now: float) -> ItemOutcome:
        ids = item.ids()
        if item.kind is ItemKind.WANT:
            return ItemOutcome(self._given(peer, known, ids))
        if not known.announced_ids.take(now, len(ids)):
            return _flood(known)
        if item.topic in self._topics:
            for message in ids:
                if message not in self._seen:
                    self._missing.hear(message, item.topic, peer, now)
        return ItemOutcome()

    def _given(self, peer: NodeId, known: _Peer, ids: Iterable[MessageId]) -> Sends:
        sends: Sends = []
        for message in ids:
            kept = self._kept.get(message)
            if kept is not None and known.given < MAX_GIVEN:
                known.given += 1
                sends.append((peer, Item(ItemKind.MESSAGE, kept.topic, kept.data)))
        return sends

    def _asked(self, now: float) -> Sends:
        """Request missing messages, and open the links to the peers that had them."""
        wanted: dict[tuple[NodeId, TopicId], list[MessageId]] = defaultdict(list)
        for peer, topic, message in self._missing.due(now - PATIENCE_SECONDS):
            wanted[peer, topic].append(message)
        sends: Sends = []
        for (peer, topic), ids in wanted.items():
            sends += [(peer, item) for item in id_items(ItemKind.WANT, topic, ids) if peer in self._peers]
            link = self._link(peer, topic)
            if link is not None and link.is_lazy:
                link.is_lazy = False
                sends.append((peer, Item(ItemKind.UNCHOKE, topic)))
        return sends

    def _lazy_ids(self, topic: TopicId) -> Sends:
        """Ids for the links without messages, and for a few peers outside the mesh."""
        sends: Sends = []
        known = self._topics[topic]
        for peer, link in known.links.items():
            sends += [(peer, item) for item in id_items(ItemKind.HAVE, topic, link.due)]
            link.due = []
        recent = self._kept.younger_than(self._last_heartbeat, topic)
        outside = [peer for peer in self._listeners(topic) if peer not in known.links] if recent else []
        for peer in self._random.sample(outside, min(LAZY_DEGREE, len(outside))):
            sends += [(peer, item) for item in id_items(ItemKind.HAVE, topic, recent)]
        return sends

    # Links

    def _handle_link(self, peer: NodeId, known: _Peer, item: Item, now: float) -> Sends:
        topic, link = item.topic, self._link(peer, item.topic)
        match item.kind:
            case ItemKind.SUBSCRIBE if len(known.topics) < MAX_TOPICS_OF_PEER:
                known.topics.add(topic)
                return self._filled(topic, now)
            case ItemKind.UNSUBSCRIBE:
                known.topics.discard(topic)
                if link is not None:
                    del self._topics[topic].links[peer]
            case ItemKind.GRAFT if link is None:
                return self._handle_graft(peer, known, topic, now)
            case ItemKind.PRUNE:
                self._end_link(peer, topic, now)
            case ItemKind.CHOKE | ItemKind.UNCHOKE if link is not None:
                link.is_lazy = item.kind is ItemKind.CHOKE
            case _:
                pass
        return []

    def _handle_graft(self, peer: NodeId, known: _Peer, topic: TopicId, now: float) -> Sends:
        mine = self._topics.get(topic)
        if mine is None or mine.backoff.get(peer, 0.0) > now:
            return [(peer, Item(ItemKind.PRUNE, topic))]
        sends: Sends = []
        if len(mine.links) >= MOST_DEGREE:
            has_needless = len(self._served(mine.links)) < len(mine.links)
            if self._gate.refusal(peer) or (mine.has_made_room and not has_needless):
                return [(peer, Item(ItemKind.PRUNE, topic))]
            sends = self._room(topic, mine, now)
        if len(known.topics) < MAX_TOPICS_OF_PEER:
            known.topics.add(topic)
        mine.links[peer] = _Link()
        return sends

    def _room(self, topic: TopicId, mine: _Topic, now: float) -> Sends:
        """End one link to make space for a requested one, preferably one without messages, once between two heartbeats.

        Otherwise the first few nodes of a swarm would fill each other's links, and later ones would not get any.
        """
        needless = [peer for peer in mine.links if self._gate.refusal(peer)]
        mine.has_made_room = mine.has_made_room or not needless
        ended = self._random.choice(
            needless or [peer for peer, link in mine.links.items() if link.is_lazy] or list(mine.links)
        )
        self._end_link(ended, topic, now)
        return [(ended, Item(ItemKind.PRUNE, topic))]

    def _filled(self, topic: TopicId, now: float) -> Sends:
        """New links while there are too few."""
        known = self._topics.get(topic)
        linked = 0 if known is None else len(self._served(known.links))
        if known is None or linked >= LEAST_DEGREE:
            return []
        known.backoff = {peer: until for peer, until in known.backoff.items() if until > now}
        free = [p for p in self._listeners(topic) if p not in known.links and p not in known.backoff]
        chosen = self._random.sample(free, min(DEGREE - linked, len(free)))
        known.links.update({peer: _Link() for peer in chosen})
        return [(peer, Item(ItemKind.GRAFT, topic)) for peer in chosen]

    def _thinned(self, topic: TopicId, now: float) -> Sends:
        """Fewer links while there are too many; links that carry nothing are ended first."""
        links = self._topics[topic].links
        if len(links) <= MOST_DEGREE:
            return []
        shuffled = self._random.sample(list(links), len(links))
        needless = sorted(shuffled, key=lambda peer: (not self._gate.refusal(peer), not links[peer].is_lazy))
        ended = needless[: len(links) - DEGREE]
        for peer in ended:
            self._end_link(peer, topic, now)
        return [(peer, Item(ItemKind.PRUNE, topic)) for peer in ended]

    def _end_link(self, peer: NodeId, topic: TopicId, now: float) -> None:
        known = self._topics.get(topic)
        if known is not None and known.links.pop(peer, None) is not None:
            known.backoff[peer] = now + BACKOFF_SECONDS

    def _listeners(self, topic: TopicId) -> list[NodeId]:
        return self._served(peer for peer, known in self._peers.items() if topic in known.topics)

    def _served(self, peers: Iterable[NodeId]) -> list[NodeId]:
        """The peers that the gate lets in: the others get no message."""
        return [peer for peer in peers if not self._gate.refusal(peer)]

    def _link(self, peer: NodeId, topic: TopicId) -> _Link | None:
        known = self._topics.get(topic)
        return known.links.get(peer) if known else None
