"""The owner policy in the snapshot: the decision in effect, its reason, and the sensor readings behind it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

USER = "user"  # in place of a rule: somebody asked for the pause


class TrainingAction(StrEnum):
    """What training may do now."""

    RUN = "run"
    THROTTLE = "throttle"
    PAUSE = "pause"


@dataclass(frozen=True)
class TrainingDecision:
    """What training may do, and why."""

    action: TrainingAction = TrainingAction.RUN
    reason: str = "Nothing holds training up."  # a sentence
    rule: str = ""  # the setting that decided, or USER; "" when nothing holds training up
    until: float | None = None  # seconds since the epoch, where it is known when this ends
    share: float = 1.0  # of the time, in which training computes; 0 while it pauses


class NetworkAction(StrEnum):
    """What may pass the network now."""

    OPEN = "open"
    SMALL_ONLY = "small_only"  # no tensors, states and shards; what is small goes on
    OFF = "off"


@dataclass(frozen=True)
class NetworkDecision:
    """What may pass the network, and why."""

    action: NetworkAction = NetworkAction.OPEN
    reason: str = "Nothing holds the network back."
    rule: str = ""
    until: float | None = None


@dataclass(frozen=True)
class SensorReading:
    """One thing that is looked at because a setting asks for it."""

    name: str  # for people: "keyboard and mouse"
    value: str  # "idle for 3 minutes", or why it is not known
    is_known: bool = True


@dataclass(frozen=True)
class OwnerPolicyStatus:
    """The decision that holds, and what it rests on."""

    decision: TrainingDecision = TrainingDecision()
    readings: tuple[SensorReading, ...] = ()
    network: NetworkDecision = NetworkDecision()
    transferred_megabytes: int = 0  # in this calendar month, sent and received
