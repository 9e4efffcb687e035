"""The event feed: sentences about the node and its run, from two successive snapshots. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from neuroshard.status.history import FeedEvent, FeedTone
from neuroshard.status.pipeline import missing_ranges
from neuroshard.status.rounds import MemberPart
from neuroshard.status.snapshot import LearningVerdict, NodeState, NodeStatus, PeerStatus
from neuroshard.status.values import plural
from neuroshard.types import LayerRange, NodeId

KEPT_EVENTS = 50
LATE_SECONDS = 20.0  # after a node left; a gap of layers that shows within this time belongs to it

_VERDICTS = {
    LearningVerdict.VERIFIED: (FeedTone.GOOD, "The model is learning: verified on text that it never trains on."),
    LearningVerdict.IMPROVING: (FeedTone.GOOD, "The model is getting better on text that it never trains on."),
    LearningVerdict.STALLED: (FeedTone.WARN, "The model has stopped getting better."),
    LearningVerdict.DIVERGED: (FeedTone.BAD, "The model is getting worse."),
}


def feed_after(before: NodeStatus, after: NodeStatus) -> tuple[FeedEvent, ...]:
    """The events after a change of the snapshot, newest first. The tuple stays the same object if nothing happened.

    An event that continues an older one of the same subject, such as the end of a pause, takes its place.
    """
    events = before.feed
    for event in _happened(before, after):
        events = _with_event(events, event)
    return events


def _with_event(events: tuple[FeedEvent, ...], event: FeedEvent) -> tuple[FeedEvent, ...]:
    rest = tuple(one for one in events if not (one.is_open and one.subject == event.subject))
    return (event, *rest)[:KEPT_EVENTS]


def _happened(before: NodeStatus, after: NodeStatus) -> Iterator[FeedEvent]:
    if before.peers is not after.peers:
        yield from _peers(before, after)
    if before.pipeline is not after.pipeline or before.state is not after.state:
        yield from _gap(before, after)
    if before.state is not after.state:
        yield from _state(before, after)
    if before.diloco is not after.diloco:
        yield from _rounds(before, after)
    if before.verification.status is not after.verification.status and after.verification.status in _VERDICTS:
        yield _event(after, "verdict", *_VERDICTS[after.verification.status])
    if before.checkpoints.alarm != after.checkpoints.alarm:
        words = after.checkpoints.alarm
        yield _event(after, "alarm", FeedTone.BAD if words else FeedTone.GOOD, words or "Checkpoints are saved again.")


def _event(status: NodeStatus, subject: str, tone: FeedTone, sentence: str, *, is_open: bool = False) -> FeedEvent:
    return FeedEvent(status.time, tone, sentence, subject, is_open=is_open)


def _open(status: NodeStatus, subject: str) -> FeedEvent | None:
    """The event of a subject that a later one can continue."""
    return next((event for event in status.feed if event.subject == subject and event.is_open), None)


def _peers(before: NodeStatus, after: NodeStatus) -> Iterator[FeedEvent]:
    known = {peer.node_id: peer for peer in before.peers}
    now = {peer.node_id for peer in after.peers}
    present = f"{plural(len(now) + 1, 'computer')} in the run."
    joined = [peer for peer in after.peers if peer.node_id not in known]
    if joined:
        who = "A computer" if len(joined) == 1 else f"{len(joined):,} computers"
        yield _event(after, "peers", FeedTone.GOOD, f"{who} joined: {present}")
    left = [peer for node, peer in known.items() if node not in now]
    if left:
        who = "A computer" if len(left) == 1 else f"{len(left):,} computers"
        # open: a gap of its layers continues this event
        yield _event(after, "departure", FeedTone.WARN, f"{who} left: {present}", is_open=_held_layers(left, after))


def _held_layers(peers: list[PeerStatus], status: NodeStatus) -> bool:
    whole = LayerRange(0, status.architecture.layer_count) if status.architecture else None
    return any(peer.layers is not None and peer.layers != whole for peer in peers)


def _gap(before: NodeStatus, after: NodeStatus) -> Iterator[FeedEvent]:
    """Layers that no node holds, and their return. Both continue the departure that caused them.

    Before this node's first step, layers are missing because everybody is still starting.
    """
    was, now = _missing(before), _missing(after)
    if was == now or after.training.steps == 0:
        return
    opened, departure = _open(before, "gap"), _open(before, "departure")
    if departure is not None and not was and after.time - departure.time > LATE_SECONDS:
        departure = None
    cause = departure or opened
    since = after.time if cause is None else cause.time
    subject = "gap" if departure is None else "departure"
    if now:
        verb = "waits" if _is_one(now) else "wait"
        sentence = f"{'A computer left; ' if departure else ''}{_layers(now)} {verb} for another computer."
        event = _event(after, subject, FeedTone.WARN, _capital(sentence), is_open=True)
    else:
        whose = "A computer left; its" if departure else "The missing"
        lost = max(0, before.training.steps - after.training.steps)
        cost = "no step lost" if lost == 0 else f"{plural(lost, 'step')} lost"
        noun = "layer" if _is_one(was) else "layers"
        sentence = f"{whose} {noun} moved; {duration_words(after.time - since)}, {cost}."
        event = _event(after, subject, FeedTone.GOOD, sentence)
    yield replace(event, time=since)


def _missing(status: NodeStatus) -> tuple[LayerRange, ...]:
    return missing_ranges(status.pipeline.stages) if status.pipeline is not None else ()


def _size(layers: LayerRange) -> int:
    return layers.stop - layers.start


def _is_one(ranges: tuple[LayerRange, ...]) -> bool:
    return len(ranges) == 1 and _size(ranges[0]) == 1


def _layers(ranges: tuple[LayerRange, ...]) -> str:
    """Layers counted from 1: "layers 3 to 4"."""
    words = [str(one.stop) if _size(one) == 1 else f"{one.start + 1} to {one.stop}" for one in ranges]
    return f"{'layer' if _is_one(ranges) else 'layers'} {', '.join(words)}"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _state(before: NodeStatus, after: NodeStatus) -> Iterator[FeedEvent]:
    match after.state:
        case NodeState.PAUSED:
            yield _event(after, "pause", FeedTone.WARN, after.state_reason, is_open=True)
        case NodeState.TRAINING if before.state is NodeState.PAUSED:
            opened = _open(before, "pause")
            words = "" if opened is None else f" after {duration_words(after.time - opened.time)}"
            yield _event(after, "pause", FeedTone.GOOD, f"Training resumed{words}.")
        case NodeState.TRAINING if before.state is NodeState.STARTING:
            restored = after.checkpoints.restored
            yield _event(after, "start", FeedTone.GOOD, f"Training started. {restored or ''}".strip())
        case NodeState.TRAINING if before.state is NodeState.WAITING_FOR_DATA:
            yield _event(after, "data", FeedTone.GOOD, "The training text arrived.")
        case NodeState.WAITING_FOR_DATA:
            yield _event(after, "data", FeedTone.WARN, after.state_reason, is_open=True)
        case NodeState.FAILED:
            yield _event(after, "failure", FeedTone.BAD, f"Training stopped: {after.state_reason}")
        case _:
            return


def _rounds(before: NodeStatus, after: NodeStatus) -> Iterator[FeedEvent]:
    """Rounds with others. Successive rounds make one event; a refused contribution of this node makes its own."""
    if after.diloco.successful_syncs > before.diloco.successful_syncs and after.diloco.members > 1:
        last, opened = after.diloco.outer_steps, _open(before, "rounds")
        first = last if opened is None else opened.first_round
        rounds = f"Round {last:,}" if first == last else f"Rounds {first:,} to {last:,}"
        sentence = f"{rounds} combined the work of {plural(after.diloco.members, 'computer')}."
        yield replace(_event(after, "rounds", FeedTone.GOOD, sentence, is_open=True), first_round=first)
        yield from _refusals(after)
    elif after.diloco.failed_syncs > before.diloco.failed_syncs:
        yield _event(after, "abandoned", FeedTone.WARN, "A round came to nothing; training continues.", is_open=True)


def _refusals(after: NodeStatus) -> Iterator[FeedEvent]:
    own: NodeId | None = after.node_id
    newest = [record for stage in after.diloco.rounds for record in stage.recent[-1:]]
    for record in newest:
        for one in record.members:
            if one.node_id == own and one.part is MemberPart.REFUSED:
                reason = one.reason.rstrip(".")
                words = f"This computer's work was refused in round {record.outer_step:,}: {reason}."
                yield _event(after, f"refusal {record.outer_step}", FeedTone.WARN, words)


def duration_words(seconds: float) -> str:
    """A duration of at least a second: 8 s, 3 min, 2 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{round(seconds / 3600)} h"
