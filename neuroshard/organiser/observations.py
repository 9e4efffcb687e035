"""The observer's messages to the organiser, and the answers: lines of JSON between two processes. Pure.

The observer has verified everything that it reports: values by the votes of a quorum, and reports by their signatures.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta, Struct

from neuroshard.decoders import json_decoder, read_json
from neuroshard.types import MAX_ADDRESS_CHARACTERS, HexDigest, NamedWallet, NodeId

MAX_LINE_BYTES = 1 << 20
MAX_CONTRIBUTORS = 64
MAX_ADDRESSES = 32
MAX_DEVICES = 16
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Loss = Annotated[float, Meta(ge=0, le=1e9)]
_Rate = Annotated[float, Meta(ge=0)]


ValueKind: TypeAlias = Literal["aggregate", "alone", "entries"]
"""Work of several members, the step of a member without others, or changes of the committee only."""


class ObserverStarted(Struct, frozen=True, tag="started", forbid_unknown_fields=True):
    """The observer needs an admission for this node."""

    node: NodeId
    wallet: NamedWallet


class CertifiedValue(Struct, frozen=True, tag="value", forbid_unknown_fields=True):
    """One height of a stage's chain that a quorum of its seats has signed."""

    stage: _Count
    statement: HexDigest  # the foundation of the chain
    start_height: _Count  # of the foundation: later heights of other foundations are void
    height: _Count
    outer_step: _Count
    at: _Count  # median of the dates that the voters signed, in seconds since 1970
    kind: ValueKind
    sequences: _Count = 0  # lower median of the accepted members' work
    seconds: _Count = 0  # since the last aggregate, by the seats' lower median
    members: _Count = 0
    accepted: Annotated[tuple[NamedWallet, ...], Meta(max_length=MAX_CONTRIBUTORS)] = ()


class StageSight(Struct, frozen=True, forbid_unknown_fields=True):
    """The nodes of one stage, by their signed reports, and the height of the chain that the observer knows."""

    replicas: _Count  # nodes that work on it
    preparing: _Count = 0  # nodes that fetch its state
    height: _Count = 0
    trouble: str = ""
    version: _Count = 1  # newest version of the run's parameters in the chain
    version_from: _Count = 0  # outer step from which it applies


class ReadyNode(Struct, frozen=True, forbid_unknown_fields=True):
    """A node that trained for the first time since its start."""

    node: NodeId
    started_at: float
    seconds: Annotated[float, Meta(ge=0)]  # from its start until its first report that it trains


class ReportedDevice(Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of device, and the number of nodes that report it."""

    device: str
    nodes: _Count


class RunSight(Struct, frozen=True, tag="sight", forbid_unknown_fields=True):
    """The run at one moment, by the signed reports of its nodes."""

    at: float
    nodes: _Count
    training_nodes: _Count
    trainers: _Count  # training nodes without layers
    stages: tuple[StageSight, ...]
    total_steps: _Count
    total_tokens: _Count
    shards_covered: _Count
    tokens_per_second: _Rate
    loss: _Loss | None = None
    min_loss: _Loss | None = None
    held_out_loss: _Loss | None = None  # lower median of the drivers' last evaluations
    held_out_step: _Count = 0
    new_tokens: _Count = 0  # reported by drivers since the last sight
    ready: tuple[ReadyNode, ...] = ()
    connections: _Count = 0
    flops_per_second: _Rate = 0.0  # sum of the reports
    reachable_nodes: _Count = 0  # that the organiser reached from outside, by their reports
    unreachable_nodes: _Count = 0
    devices: tuple[ReportedDevice, ...] = ()  # the most frequent ones
    explanation: str = ""  # of the state of the observer's network
    # of a few random nodes that report, as these announce them
    addresses: Annotated[
        tuple[Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS)], ...], Meta(max_length=MAX_ADDRESSES)
    ] = ()


class ObserverEnded(Struct, frozen=True, tag="ended", forbid_unknown_fields=True):
    """The observer's process has ended; it starts again."""

    reason: str


Observation: TypeAlias = ObserverStarted | CertifiedValue | RunSight | ObserverEnded


class GivenAdmission(Struct, frozen=True, forbid_unknown_fields=True):
    """The organiser's answer to the observer."""

    admission: bytes


def observation_line(message: Observation | GivenAdmission) -> bytes:
    """One line with its end."""
    return msgspec.json.encode(message) + b"\n"


def read_observation(line: bytes) -> Observation:
    """Raises ValueError."""
    return cast("Observation", json_decoder(Observation).decode(line))


def read_given_admission(line: bytes) -> GivenAdmission:
    """Raises ValueError."""
    return read_json(line, GivenAdmission, MAX_LINE_BYTES)
