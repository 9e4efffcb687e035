"""Status of a stage's replicas, as nodes report it to each other: the messages, the query, the choice of a donor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from neuroshard.identity.strict_json import exact_object, flag_field, hash_field, number_field, whole_field
from neuroshard.messages import Frame, FrameLimits
from neuroshard.state.download import ReplicaClient, ask_replicas
from neuroshard.state.transfer_messages import (
    LARGEST_NUMBER,
    LyingDonorError,
    StageName,
    read_header,
    request_about,
)
from neuroshard.types import NodeId

STANDING = "stage/standing"
LIMITS = FrameLimits(max_header_bytes=1024)  # of request and answer
_LONGEST_SECONDS = 1e10


@dataclass(frozen=True)
class ReplicaStatus:
    """Numbers are that node's word until its state has been fetched and checked."""

    is_live: bool  # the node trains the stage; otherwise it keeps a copy of another one's state
    steps: int
    outer_step: int
    root: str  # hex hash of the outer state; "" while it is not known
    age_seconds: float = 0.0  # of a copy: since its state was taken
    copied_seconds: float | None = None  # of a live one: age of the newest copy that another node keeps of it
    sequences: int = 0  # counted since the last round
    in_round: bool = False
    is_certified: bool = False  # a certificate names the voters of the next round
    wallet_rounds: int = 0  # certified contributions to this state so far, one a wallet and round

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


def standing_request(stage: StageName) -> Frame:
    """Asks a node how far its state of a stage is."""
    return request_about(STANDING, stage)


def standing_answer(standing: ReplicaStatus | None) -> Frame:
    """None: the node has nothing of this stage."""
    return Frame(STANDING, {"standing": None if standing is None else asdict(standing)})


def read_standing(frame: Frame) -> ReplicaStatus | None:
    """What a node has told. Raises LyingDonorError for what cannot be read."""
    try:
        told = read_header(frame, "standing")["standing"]
        if told is None:
            return None
        fields = exact_object(told, set(ReplicaStatus.__dataclass_fields__), "standing")
        root, copied = fields["root"], fields["copied_seconds"]
        return ReplicaStatus(
            is_live=flag_field(fields["is_live"], "is_live"),
            steps=whole_field(fields["steps"], 0, LARGEST_NUMBER, "steps"),
            outer_step=whole_field(fields["outer_step"], 0, LARGEST_NUMBER, "outer_step"),
            root="" if root == "" else hash_field(root, "root"),
            age_seconds=_age(number_field(fields["age_seconds"], "age_seconds")),
            copied_seconds=None if copied is None else _age(number_field(copied, "copied_seconds")),
            sequences=whole_field(fields["sequences"], 0, LARGEST_NUMBER, "sequences"),
            in_round=flag_field(fields["in_round"], "in_round"),
            is_certified=flag_field(fields["is_certified"], "is_certified"),
            wallet_rounds=whole_field(fields["wallet_rounds"], 0, LARGEST_NUMBER, "wallet_rounds"),
        )
    except ValueError as error:
        raise LyingDonorError(f"What it says of its state cannot be read: {error}.") from None


def _age(seconds: float) -> float:
    return min(max(0.0, seconds), _LONGEST_SECONDS)


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
        return read_standing(await asking.ask(peer, standing_request(stage), LIMITS, STANDING_SECONDS))
