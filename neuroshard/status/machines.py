"""The machines of one wallet: the report that each sends to the others, and the list that the owner sees.

This module must not load PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from neuroshard.status.snapshot import NodeState, NodeStatus
from neuroshard.status.values import about
from neuroshard.types import PRINTABLE, NodeId

MachineAction: TypeAlias = Literal["pause", "resume"]

MAX_NAME_CHARACTERS = 64
MAX_SENTENCE_CHARACTERS = 300
_MAX_VERSION_CHARACTERS = 32
_MAX_RATE = 1e9  # tokens per second
_MAX_COUNT = 10**16


@dataclass(frozen=True)
class MachineStatus:
    """The report of one machine to the other machines of its wallet. The bounds apply to reports that arrive."""

    name: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS), about("host name of the computer")]
    version: Annotated[str, Meta(max_length=_MAX_VERSION_CHARACTERS, pattern=PRINTABLE), about("of NeuroShard")]
    state: NodeState
    reason: Annotated[str, Meta(max_length=MAX_SENTENCE_CHARACTERS), about("reason for the state, in a sentence")]
    run_id: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z"), about("run that it serves; empty: none yet")]
    parameters: Annotated[int, Meta(ge=0, le=_MAX_COUNT), about("parameters of the whole model; 0: not known yet")]
    tokens_per_second: Annotated[float, Meta(ge=0, le=_MAX_RATE), about("present rate of training", "tokens/s")]
    tokens_in_a_day: Annotated[
        int, Meta(ge=0, le=_MAX_COUNT), about("tokens that it trained on in the last 24 hours", "tokens")
    ]


def machine_status(status: NodeStatus, name: str) -> MachineStatus:
    """The report that follows from a node's status; `name` is that of its computer."""
    rate = status.training.tokens_per_second if status.state is NodeState.TRAINING else 0.0
    tokens = sum(period.tokens for period in status.contribution.day.points)
    return MachineStatus(
        name=printable(name, MAX_NAME_CHARACTERS),
        version=status.version[:_MAX_VERSION_CHARACTERS],
        state=status.state,
        reason=printable(status.state_reason, MAX_SENTENCE_CHARACTERS),
        run_id="" if status.run is None else status.run.run_id,
        parameters=0 if status.model is None else status.model.parameter_count,
        tokens_per_second=min(max(rate, 0.0), _MAX_RATE) if isfinite(rate) else 0.0,
        tokens_in_a_day=min(tokens, _MAX_COUNT),
    )


def printable(text: str, most: int) -> str:
    """The first `most` printable characters of a text: host names and paths may contain anything."""
    return "".join(character for character in text if character.isprintable())[:most]


@dataclass(frozen=True)
class Machine:
    """A machine of the owner's wallet, as this one knows it."""

    node_id: NodeId
    is_here: Annotated[bool, about("this computer")]
    is_reachable: Annotated[bool, about("it has answered the last question")]
    seen_at: Annotated[float | None, about("time of its status; null: it has never answered", "s since 1970")] = None
    status: Annotated[MachineStatus | None, about("its last report; null: it has never answered")] = None
    has_obeyed: Annotated[
        bool | None, about("whether it paused or resumed in this call; null: it got no command in this call")
    ] = None
    message: Annotated[str, about("its answer to the command of this call, or the reason why there is none")] = ""


@dataclass(frozen=True)
class MachineList:
    """GET /api/machines: the nodes of this node's wallet, this computer first."""

    machines: tuple[Machine, ...]
    message: Annotated[str, about("the outcome of the command in a sentence; empty for a list")] = ""
