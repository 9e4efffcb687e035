"""Who takes part in the next round of a stage and when it is called: decisions and messages. Pure.

One replica calls: it asks those of its line whether they will take part, then tells those who will who they all are.
Nothing here makes a round safe: members that do not agree on who they are do not exchange anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from neuroshard.identity import hash_parts
from neuroshard.network import RequestRefusedError
from neuroshard.swarm.claim_fields import hash_field, line_field, list_field, whole_field
from neuroshard.training.transfer.fields import LARGEST_NUMBER, StageName, read_request_about, request_about
from neuroshard.training.transfer.standing import MAX_MEMBERS, Standing, leading_line
from neuroshard.types import NodeId
from neuroshard.wire import Frame, FrameLimits

CALL = "round/call"
MAX_NODE_ID_CHARACTERS = 64
CALL_LIMITS = FrameLimits(max_header_bytes=16 * 1024)
ANSWER_LIMITS = FrameLimits(max_header_bytes=256)


@dataclass(frozen=True)
class RoundTimes:
    """When a round is called; members are asked again and again, so every time is bounded."""

    look_seconds: float = 10.0  # from one look at the other replicas to the next
    near_seconds: float = 1.0  # the same when a round is near
    turn_seconds: float = 10.0  # after so long without a call it is the next one's turn to call
    patience_seconds: float = 30.0  # for replicas of the line that do not answer or are not ready
    promise_seconds: float = 15.0  # for the call to be completed
    retry_seconds: float = 5.0  # after a round that was abandoned; doubled from one to the next
    longest_retry_seconds: float = 300.0
    behind_seconds: float = 15.0  # a replica that is of another line than the others for so long follows them


class CallStep(StrEnum):
    """What a call wants of its members."""

    ASK = "ask"  # will you take part?
    BEGIN = "begin"  # these take part
    CANCEL = "cancel"  # nothing comes of it


@dataclass(frozen=True)
class Call:
    """What the caller says to each member."""

    outer_step: int
    root: str
    view: int
    members: tuple[NodeId, ...]  # with the caller; those that are asked, and then those that take part
    step: CallStep


def call_frame(stage: StageName, call: Call) -> Frame:
    """The call as a request."""
    return request_about(
        CALL,
        stage,
        outer_step=call.outer_step,
        root=call.root,
        view=call.view,
        members=list(call.members),
        step=call.step.value,
    )


def read_call(frame: Frame) -> tuple[StageName, Call]:
    """The call in a request. Raises RequestRefusedError."""
    stage, fields = read_request_about(frame, "outer_step", "root", "view", "members", "step")
    try:
        members = list_field(fields["members"], MAX_MEMBERS, "members")
        return stage, Call(
            outer_step=whole_field(fields["outer_step"], 0, LARGEST_NUMBER, "outer_step"),
            root=hash_field(fields["root"], "root"),
            view=whole_field(fields["view"], 0, LARGEST_NUMBER, "view"),
            members=tuple(NodeId(line_field(member, MAX_NODE_ID_CHARACTERS, "member")) for member in members),
            step=CallStep(line_field(fields["step"], 16, "step")),
        )
    except ValueError as error:
        raise RequestRefusedError(f"The call cannot be read: {error}.") from None


def turn_order(stage: StageName, own: Standing, nodes: Sequence[NodeId]) -> list[NodeId]:
    """Who calls before whom: another order for every outer step, the same for everybody."""
    return sorted(
        nodes, key=lambda node: hash_parts("neuroshard/round-call", stage.run_id, stage.layers.start, own.root, node)
    )


def roster_of(stage: StageName, self_id: NodeId, own: Standing, others: Mapping[NodeId, Standing]) -> list[NodeId]:
    """Those who could take part now: of one's own line, with work to contribute; as many as fit everyone's memory.

    Of more than that other ones take part from round to round.
    """
    if not own.root or not own.sequences:
        return []
    fitting = [node for node, told in others.items() if told.is_live and told.line == own.line and told.sequences]
    in_turn = turn_order(stage, own, fitting)
    for size in range(min(own.most_members, MAX_MEMBERS, len(fitting) + 1), 1, -1):
        able = [node for node in in_turn if others[node].most_members >= size]
        if len(able) >= size - 1:
            return [self_id, *able[: size - 1]]
    return [self_id]


def must_follow(own: Standing, others: Mapping[NodeId, Standing]) -> bool:
    """Whether this replica's state is not the one that the others go on with, so that it must take theirs over."""
    if not own.root or own.in_round or any(other.in_round for other in others.values()):
        return False  # somebody is on the way from one line to the next
    live = [other for other in others.values() if other.is_live]
    if any(not other.root for other in live):
        return False
    line = leading_line([own, *live])
    if line == own.line:
        return own.steps == 0 and any(other.steps > 0 for other in live if other.line == line)
    return any(other.steps > 0 for other in live if other.line == line)
