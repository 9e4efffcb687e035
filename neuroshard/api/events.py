"""What happened between two snapshots, as Server-Sent Events: pure functions from values to bytes."""

from __future__ import annotations

from collections.abc import Iterator

from neuroshard.api.bodies.base import Answer
from neuroshard.api.bodies.network import PeerBody
from neuroshard.api.bodies.node import CheckpointGenerationBody, HeldOutBody, LogRecordBody
from neuroshard.api.bodies.training import HistoryPoint
from neuroshard.api.views.network import peer_body
from neuroshard.api.views.training import diloco_progress, history_point
from neuroshard.status.snapshot import NodeStatus
from neuroshard.telemetry.ring import LogLine

HEARTBEAT = b": nothing new\n\n"
START = b"retry: 2000\n\n"
# Sent when a client was too slow or training went back to an earlier step: what it holds has gaps.
RESET = b"event: reset\ndata: {}\n\n"


class LossEvent(Answer):
    """New points of the training curve, oldest first."""

    points: list[HistoryPoint]


class PeersEvent(Answer):
    """Peers that came or changed, and node ids of those that went."""

    count: int
    changed: list[PeerBody]
    gone: list[str]


def encode_event(name: str, json: bytes, identity: int | None = None) -> bytes:
    """One event; JSON of our own making holds no line break. `identity` comes back as Last-Event-ID."""
    prefix = b"" if identity is None else b"id: %d\n" % identity
    return prefix + b"event: " + name.encode() + b"\ndata: " + json + b"\n\n"


def events_between(before: NodeStatus, now: NodeStatus) -> Iterator[bytes]:
    """Everything but the status itself that is new in the later snapshot, in the order of a training step."""
    if now.training.steps < before.training.steps:
        yield RESET
        return
    last_point = before.history[-1].step if before.history else -1
    points = [history_point(point) for point in now.history if point.step > last_point]
    if points:
        yield _event("loss", LossEvent(points=points))
    evaluated = len(before.training.held_out)
    last_evaluation = before.training.held_out[-1].step if evaluated else -1
    for evaluation in now.training.held_out:
        if evaluation.step > last_evaluation:
            yield _event("evaluation", HeldOutBody.model_validate(evaluation))
    known = {(saved.path, saved.time) for saved in before.checkpoints.generations}
    for saved in reversed(now.checkpoints.generations):
        if (saved.path, saved.time) not in known:
            yield _event("checkpoint", CheckpointGenerationBody.model_validate(saved))
    if _rounds(before) != _rounds(now):
        yield _event("sync", diloco_progress(now.diloco))


def peers_between(before: NodeStatus, now: NodeStatus) -> Iterator[bytes]:
    """One event about the peers that came, changed or went; none when nothing did."""
    if now.peers is before.peers:
        return
    known = {peer.node_id: peer for peer in before.peers}
    changed = [peer for peer in now.peers if known.pop(peer.node_id, None) != peer]
    if changed or known:
        bodies = [peer_body(peer) for peer in changed]
        yield _event("peers", PeersEvent(count=len(now.peers), changed=bodies, gone=sorted(known)))


def log_event(line: LogLine) -> bytes:
    """One log line; its sequence number is the event's id, so that a client goes on after the last one it got."""
    return encode_event("log", LogRecordBody.model_validate(line).model_dump_json().encode(), line.sequence)


def _event(name: str, body: Answer) -> bytes:
    return encode_event(name, body.model_dump_json().encode())


def _rounds(status: NodeStatus) -> tuple[int, int, int]:
    diloco = status.diloco
    return diloco.outer_steps, diloco.successful_syncs, diloco.failed_syncs
