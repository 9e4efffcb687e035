"""What other members said lately: it may be about a round that this node has yet to enter."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from neuroshard.swarm.certified.bodies import MAX_CALLED
from neuroshard.swarm.certified.messages import Message
from neuroshard.types import NodeId

MOST_MESSAGES = 16  # of each node, without what is large in a round: more than it says in two views
MOST_BYTES = 1 << 20  # of each node: some proposals of 64 members


class Heard:
    """The newest messages of so many nodes as are called to a round; who has been silent longest is forgotten first."""

    def __init__(self) -> None:
        self._messages: dict[NodeId, deque[tuple[Message, int]]] = {}

    def keep(self, sender: NodeId, message: Message, size: int) -> None:
        """Remember a message that came as so many bytes."""
        messages = self._messages.pop(sender, None) or deque[tuple[Message, int]](maxlen=MOST_MESSAGES)
        messages.append((message, size))
        while sum(one for _, one in messages) > MOST_BYTES:
            messages.popleft()
        self._messages[sender] = messages
        for longest_silent in list(self._messages)[:-MAX_CALLED]:
            del self._messages[longest_silent]

    def __iter__(self) -> Iterator[tuple[NodeId, Message]]:
        """Sender and message, of each sender in the order in which they came."""
        return ((sender, message) for sender, messages in self._messages.items() for message, _ in messages)
