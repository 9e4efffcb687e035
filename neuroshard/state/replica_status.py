"""Status of a stage's replicas, as nodes report it: the messages, the query, and the choice of a donor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from msgspec import Meta, Struct

from neuroshard.messages import Frame, FrameLimits
from neuroshard.state.download import ReplicaClient, ask_replicas
from neuroshard.state.transfer_messages import Count, Seconds, StageName
from neuroshard.types import NodeId

REPLICA_STATUS = "stage/status"


@dataclass(frozen=True)
class ReplicaStatus:
    """A node's unverified report of its state; only a download and its checks prove the numbers."""

    is_live: bool  # the node trains the stage; otherwise it keeps a copy of another node's state
    steps: Count
    outer_step: Count
    root: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]  # hex hash of the outer state; "" while it is not known
    age_seconds: Seconds = 0.0  # of a copy: since its state was taken
    copied_seconds: Seconds | None = None  # of a live replica: age of the newest copy at another node
    sequences: Count = 0  # counted since the last round
    in_round: bool = False
    is_certified: bool = False  # it is the newest state that the stage's chain certifies here
    is_ready: bool = True  # the node could enter a round now
    height: Count = 0  # of the newest value of the stage's chain
    wallet_rounds: Count = 0  # certified contributions to this state so far, one per wallet and round
    kept: Count = 0  # outer steps before this state whose aggregates the node can send

    @property
    def line(self) -> tuple[int, str]:
        """The line of training: replicas with the same value diverged after the same round and can be averaged."""
        return self.outer_step, self.root

    @property
    def work(self) -> tuple[int, int]:
        """Outer and inner steps, which order replicas by progress."""
        return self.outer_step, self.steps


def leading_line(statuses: Iterable[ReplicaStatus]) -> tuple[int, str] | None:
    """Return the line that diverged replicas of a stage must follow; None when no replica names one.

    It is the line of most replicas, because their nodes can be seen. Ties are resolved by more certified wallet-rounds,
    then more outer steps, then more inner steps, then the lower root: nodes that see the same replicas choose the same
    line. All numbers are unverified reports, so none of them outweighs a majority.
    """
    lines: dict[tuple[int, str], list[ReplicaStatus]] = {}
    for status in statuses:
        if status.is_live and status.root:
            lines.setdefault(status.line, []).append(status)

    def key(line: tuple[int, str]) -> tuple[int, int, int, int]:
        replicas = lines[line]
        rounds = max(replica.wallet_rounds for replica in replicas)
        return len(replicas), rounds, line[0], max(replica.steps for replica in replicas)

    return max(sorted(lines, key=lambda line: line[1]), key=key, default=None)


def choose_donor(statuses: Mapping[NodeId, ReplicaStatus], own: ReplicaStatus | None = None) -> NodeId | None:
    """Choose the node to download a stage's state from; None when the own state is as good, or no replica has a step.

    Live replicas come before copies: a copy is of a node that is gone, and of a line that others may have continued.
    Replicas of one line keep their own work.
    """
    trained = {node: status for node, status in statuses.items() if status.steps > 0}
    live = {node: status for node, status in trained.items() if status.is_live}
    if live:
        line = leading_line([*live.values(), *([] if own is None else [own])])
        if own is not None and own.line == line:
            return None
        chosen = {node: status for node, status in live.items() if line in (None, status.line)}
    else:
        chosen = {node: status for node, status in trained.items() if own is None or status.work > own.work}
    return max(sorted(chosen), key=lambda node: chosen[node].work, default=None)


class StatusRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks a node for the status of its state of a stage."""

    stage: StageName


class StatusAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The status; None when the node has no state of the stage."""

    status: ReplicaStatus | None


STATUS_REQUEST = FrameLimits(max_header_bytes=1024, message=StatusRequest)
STATUS_ANSWER = FrameLimits(max_header_bytes=1024, message=StatusAnswer)
STATUS_SECONDS = 5.0


async def query_statuses(
    asking: ReplicaClient, stage: StageName, peers: Sequence[NodeId]
) -> dict[NodeId, ReplicaStatus]:
    """Query the status of a stage at these nodes; nodes that do not answer or have no state are left out."""
    answers = await ask_replicas(peers, partial(query_status, asking, stage))
    return {peer: status for peer, status in answers.items() if status is not None}


async def query_status(asking: ReplicaClient, stage: StageName, peer: NodeId) -> ReplicaStatus | None:
    """Query the status of a stage at one node; None: it has no state of it. Raises DonorError."""
    with asking.blaming(peer):
        request = Frame(REPLICA_STATUS, StatusRequest(stage))
        answer = await asking.ask(peer, request, STATUS_ANSWER, STATUS_SECONDS)
        return answer.read(StatusAnswer).status
