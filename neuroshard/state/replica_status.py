"""Status of a stage's replicas, as nodes report it to each other: the messages, the query, the choice of a donor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from msgspec import Meta, Struct

from neuroshard.messages import Frame, FrameLimits
from neuroshard.state.download import ReplicaClient, ask_replicas
from neuroshard.state.transfer_messages import (
    Count,
    Seconds,
    StageName,
)
from neuroshard.types import NodeId

STANDING = "stage/standing"


@dataclass(frozen=True)
class ReplicaStatus:
    """Numbers are that node's word until its state has been fetched and checked."""

    is_live: bool  # the node trains the stage; otherwise it keeps a copy of another one's state
    steps: Count
    outer_step: Count
    root: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]  # hex hash of the outer state; "" while it is not known
    age_seconds: Seconds = 0.0  # of a copy: since its state was taken
    copied_seconds: Seconds | None = None  # of a live one: age of the newest copy that another node keeps of it
    sequences: Count = 0  # counted since the last round
    in_round: bool = False
    is_certified: bool = False  # a certificate names the voters of the next round
    wallet_rounds: Count = 0  # certified contributions to this state so far, one a wallet and round

    @property
    def line(self) -> tuple[int, str]:
        """Replicas with the same one went apart after the same round: they can be averaged."""
        return self.outer_step, self.root

    @property
    def work(self) -> tuple[int, int]:
        """What is compared to find the furthest."""
        return self.outer_step, self.steps


def leading_line(standings: Iterable[ReplicaStatus]) -> tuple[int, str] | None:
    """The line that replicas of a stage follow when they have come apart; None when none of them names one.

    That of most replicas, whose nodes are there to be seen; of equally many the one with more certified wallet-rounds
    (DESIGN 4.5, point 7), then more outer steps, then more inner ones, then the lower root: everybody who sees the same
    replicas comes to the same line. All numbers are their nodes' word, so none of them outweighs a majority.
    """
    lines: dict[tuple[int, str], list[ReplicaStatus]] = {}
    for standing in standings:
        if standing.is_live and standing.root:
            lines.setdefault(standing.line, []).append(standing)

    def key(line: tuple[int, str]) -> tuple[int, int, int, int]:
        replicas = lines[line]
        rounds = max(replica.wallet_rounds for replica in replicas)
        return len(replicas), rounds, line[0], max(replica.steps for replica in replicas)

    return max(sorted(lines, key=lambda line: line[1]), key=key, default=None)


def choose_donor(standings: Mapping[NodeId, ReplicaStatus], own: ReplicaStatus | None = None) -> NodeId | None:
    """From whom to take a stage's state; None when the own one is as good, or nobody has made a step.

    Who trains comes before copies: these are of somebody who is gone, and of a line that has ended where others go on.
    Replicas of one line keep what each has done.
    """
    trained = {node: standing for node, standing in standings.items() if standing.steps > 0}
    live = {node: standing for node, standing in trained.items() if standing.is_live}
    if live:
        line = leading_line([*live.values(), *([] if own is None else [own])])
        if own is not None and own.line == line:
            return None
        chosen = {node: standing for node, standing in live.items() if line in (None, standing.line)}
    else:
        chosen = {node: standing for node, standing in trained.items() if own is None or standing.work > own.work}
    return max(sorted(chosen), key=lambda node: chosen[node].work, default=None)


class StatusRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks a node for the status of its state of a stage."""

    stage: StageName


class StatusAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The status; None when the node has no state of the stage."""

    status: ReplicaStatus | None


STATUS_REQUEST = FrameLimits(max_header_bytes=1024, message=StatusRequest)
STATUS_ANSWER = FrameLimits(max_header_bytes=1024, message=StatusAnswer)


def standing_request(stage: StageName) -> Frame:
    """The request as a frame."""
    return Frame(STANDING, StatusRequest(stage))


def standing_answer(standing: ReplicaStatus | None) -> Frame:
    """The answer as a frame."""
    return Frame(STANDING, StatusAnswer(standing))


STANDING_SECONDS = 5.0


async def query_statuses(
    asking: ReplicaClient, stage: StageName, peers: Sequence[NodeId]
) -> dict[NodeId, ReplicaStatus]:
    """What these nodes say of their state of the stage; who does not answer or has nothing is left out."""
    answers = await ask_replicas(peers, partial(query_status, asking, stage))
    return {peer: status for peer, status in answers.items() if status is not None}


async def query_status(asking: ReplicaClient, stage: StageName, peer: NodeId) -> ReplicaStatus | None:
    """What one node says of its state of the stage; None: it has nothing of it. Raises DonorError."""
    with asking.blaming(peer):
        answer = await asking.ask(peer, standing_request(stage), STATUS_ANSWER, STANDING_SECONDS)
        return answer.read(StatusAnswer).status
