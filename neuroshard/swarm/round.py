"""One sync round: exchange contributions, judge them, aggregate, and compare the result.

This plain round needs every member and has no certificate. Members that complete hold the same bytes, because each saw
the root of all others; but when the last message to one of them is lost, that one aborts alone and must resynchronise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import torch
from torch import Tensor

from neuroshard.aggregation import (
    AggregatorConfig,
    SliceRows,
    TooFewContributionsError,
    judge,
    needs_gram,
    reduce_slice,
    reduction_by,
    slice_statistics,
)
from neuroshard.aggregation.sums import dot_product
from neuroshard.compression import Codec, Fp32Codec, MalformedVectorError, checked_vector
from neuroshard.identity import hash_parts
from neuroshard.network import MessageTooLargeError, PeerUnreachableError, TransportClosedError
from neuroshard.swarm.frames import (
    contribution_frame,
    read_contribution,
    read_root,
    root_frame,
    vector_digest,
)
from neuroshard.swarm.group import Group, RoundDescriptor, round_id
from neuroshard.swarm.outcome import Aborted, AbortKind, Completed, RefusedMember, RoundOutcome
from neuroshard.types import NodeId

CONTRIBUTION_KIND = "round/contribution"
ROOT_KIND = "round/root"
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Message:
    """What a member sent; whoever carried it has authenticated the sender."""

    sender: NodeId
    kind: str
    payload: bytes = field(repr=False)


class Messenger(Protocol):
    """Carries the messages of rounds. What nobody waits for has no place in it: strangers send such things."""

    async def send(self, peer: NodeId, kind: str, payload: bytes) -> None:
        """Send a message; returns when the peer has it.

        Raises PeerUnreachableError, MessageTooLargeError or TransportClosedError.
        """
        ...

    async def receive(self, kind: str) -> Message:
        """The next message of this kind, from anybody. Raises TransportClosedError."""
        ...


class NobodyElse:
    """The messenger of a group of one."""

    async def send(self, peer: NodeId, kind: str, payload: bytes) -> None:
        """See Messenger. Raises PeerUnreachableError."""
        await anyio.lowlevel.checkpoint()
        raise PeerUnreachableError(f"Peer {peer} is not in a group of one.")

    async def receive(self, kind: str) -> Message:
        """See Messenger; nothing ever comes."""
        await anyio.sleep_forever()
        raise AssertionError


class Offload(Protocol):
    """Runs a blocking function elsewhere and waits for its value."""

    def __call__(self, function: Callable[[], _Value], /) -> Awaitable[_Value]:
        """The function's value; what it raises is raised here."""
        ...


async def run_round(
    messenger: Messenger,
    descriptor: RoundDescriptor,
    group: Group,
    contribution: Tensor,
    *,
    aggregator: AggregatorConfig,
    codec: Codec,
    deadline_seconds: float,
    offload: Offload = anyio.to_thread.run_sync,
) -> RoundOutcome:
    """Aggregate this node's contribution (d,) with the group's; a group of one takes the same way.

    `deadline_seconds` counts from now. `offload` runs the computing; a virtual clock must not run on meanwhile, so
    tests give one that computes at once. Raises ValueError when the contribution is no contiguous fp32 CPU vector
    or the codec is not the descriptor's; whatever happens on the network is an outcome.
    """
    own = checked_vector(contribution)
    if codec.name != descriptor.codec:
        raise ValueError(f"the round uses codec {descriptor.codec!r}, not {codec.name!r}")
    if not group.others:
        codec = Fp32Codec()  # nothing travels, so nothing is lost
    exchange = _Exchange(messenger, group, round_id(descriptor, group), offload)
    with anyio.move_on_after(deadline_seconds):
        rows = await _contributions(exchange, own, codec, offload)
        if isinstance(rows, Aborted):
            return rows
        outcome = await offload(lambda: _reduced(rows, exchange.round_id, group, aggregator, codec))
        return outcome if isinstance(outcome, Aborted) else await _confirmed(exchange, outcome)
    return Aborted(f"not all members answered within {deadline_seconds:g} s", AbortKind.DEADLINE)


async def _contributions(exchange: _Exchange, own: Tensor, codec: Codec, offload: Offload) -> Tensor | Aborted:
    """Rows (n, d) of all members, in the group's order, as everybody decodes them."""

    def sealed() -> bytes | None:
        if not isfinite(dot_product(own, own)):
            return None
        return contribution_frame(exchange.round_id, codec.encode(own))

    members, length = exchange.group.members, own.shape[0]
    if not exchange.group.others:
        return codec.round_trip(own).unsqueeze(0)
    frame = await offload(sealed)
    if frame is None:  # never reaches a peer
        return Aborted("this node's contribution contains numbers that are not finite", AbortKind.REFUSED)
    rows = torch.empty(len(members), length)  # what comes is decoded into its row: nothing is held twice
    rows[members.index(exchange.group.self_id)].copy_(codec.round_trip(own))

    def read(sender: NodeId, data: bytes) -> bool | None:
        vector = read_contribution(data, exchange.round_id, codec, length)
        if vector is None:
            return None
        rows[members.index(sender)].copy_(vector)
        return True

    received = await exchange.gather(CONTRIBUTION_KIND, frame, read)
    return received if isinstance(received, Aborted) else rows


def _reduced(rows: Tensor, the_round: bytes, group: Group, aggregator: AggregatorConfig, codec: Codec) -> RoundOutcome:
    """Gates, clipping, aggregation: the same on every member that holds the same rows. The aggregate replaces one."""
    whole = SliceRows.of(rows)
    total = slice_statistics(whole, with_gram=needs_gram(aggregator))
    verdict = judge(rows, total)
    reason = verdict.abort_reason
    if reason is not None:
        return Aborted(reason, AbortKind.REFUSED)
    try:
        reduction = reduction_by(aggregator, total, verdict)
    except TooFewContributionsError as error:
        return Aborted(str(error), AbortKind.REFUSED)
    aggregate = codec.round_trip(reduce_slice(whole, reduction, out=rows[0]))
    accepted = tuple(group.members[i] for i in verdict.accepted)
    refused = tuple(RefusedMember(group.members[i], why) for i, why in sorted(verdict.refused.items()))
    root = hash_parts("neuroshard/round-result", the_round, len(accepted), *accepted, vector_digest(aggregate))
    return Completed(aggregate, group.members, accepted, refused, root.hex(), verdict.robust)


async def _confirmed(exchange: _Exchange, outcome: Completed) -> RoundOutcome:
    """The outcome, once every member has named the same root."""
    root = bytes.fromhex(outcome.root)
    roots = await exchange.gather(
        ROOT_KIND, root_frame(exchange.round_id, root), lambda _, data: read_root(data, exchange.round_id)
    )
    if isinstance(roots, Aborted):
        return roots
    differing = sorted(member for member, other in roots.items() if other != root)
    if differing:
        return Aborted(f"{len(differing)} members came to another result: {differing[0]}", AbortKind.DISAGREEMENT)
    return outcome


class _Exchange:
    """Every member sends one message of a kind to every other and reads one from each."""

    def __init__(self, messenger: Messenger, group: Group, the_round: bytes, offload: Offload) -> None:
        self._messenger = messenger
        self._offload = offload
        self.group = group
        self.round_id = the_round

    async def gather(
        self, kind: str, frame: bytes, read: Callable[[NodeId, bytes], _Value | None]
    ) -> dict[NodeId, _Value] | Aborted:
        """What `read` makes of the others' messages, each once; those of strangers and other rounds are dropped."""
        others = self.group.others
        received: dict[NodeId, _Value] = {}
        troubles: list[Aborted] = []
        async with anyio.create_task_group() as tasks:

            async def send(peer: NodeId) -> None:
                trouble = await self._sent(peer, kind, frame)
                if trouble is not None:
                    troubles.append(trouble)
                    tasks.cancel_scope.cancel()

            for peer in others:
                tasks.start_soon(send, peer)
            while len(received) < len(others):
                taken = await self._taken(kind, read, received.keys())
                if isinstance(taken, Aborted):
                    troubles.append(taken)
                    tasks.cancel_scope.cancel()
                    break
                received |= taken
        return troubles[0] if troubles else received

    async def _taken(
        self, kind: str, read: Callable[[NodeId, bytes], _Value | None], known: Collection[NodeId]
    ) -> dict[NodeId, _Value] | Aborted:
        """The next message by its sender; nothing when it is a stranger's, another round's or a second one."""
        try:
            message = await self._messenger.receive(kind)
        except TransportClosedError as error:
            return Aborted(str(error), AbortKind.UNREACHABLE)
        if message.sender not in self.group.others or message.sender in known:
            return {}  # one peer counts once
        try:
            value = await self._offload(lambda: read(message.sender, message.payload))
        except MalformedVectorError as error:
            return Aborted(f"{message.sender}: {error}", AbortKind.MALFORMED)
        return {} if value is None else {message.sender: value}

    async def _sent(self, peer: NodeId, kind: str, frame: bytes) -> Aborted | None:
        try:
            await self._messenger.send(peer, kind, frame)
        except (PeerUnreachableError, MessageTooLargeError, TransportClosedError) as error:
            return Aborted(str(error), AbortKind.UNREACHABLE)
        return None
