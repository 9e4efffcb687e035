"""The owner policy in the snapshot: the decision in effect, its reason, and the sensor readings behind it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from neuroshard.status.values import Number, about

USER = "user"  # in place of a rule: a person requested the pause


class TrainingAction(StrEnum):
    """Effect of the owner's rules: whether training may run at full speed, run slowly, or must pause."""

    RUN = "run"
    THROTTLE = "throttle"
    PAUSE = "pause"


@dataclass(frozen=True)
class TrainingDecision:
    """Effect of the owner's rules on training."""

    action: Annotated[TrainingAction, about("what training may do", gauge="training_allowed")] = TrainingAction.RUN
    reason: Annotated[str, about("reason for the action, in a sentence", brief="training limits")] = (
        "Nothing limits training."
    )
    rule: Annotated[
        str,
        about(
            'setting that decided; "user" for a pause by hand; empty when nothing limits training', brief="limited by"
        ),
    ] = ""
    until: Annotated[
        float | None, about("time at which this ends; null: not known", "s since 1970", brief="limited until")
    ] = None
    share: Annotated[
        Number,
        about("share of the time for training; 0 during a pause", "0..1", gauge="compute_share"),
    ] = 1.0


class NetworkAction(StrEnum):
    """Kinds of messages that the owner's rules let the network carry now."""

    OPEN = "open"
    SMALL_ONLY = "small_only"  # no tensors, states and shards; small messages continue
    OFF = "off"


@dataclass(frozen=True)
class NetworkDecision:
    """Effect of the owner's rules on the network."""

    action: Annotated[NetworkAction, about("what the network may carry; small_only: no tensors, states and shards")] = (
        NetworkAction.OPEN
    )
    reason: Annotated[str, about("reason for the action, in a sentence", brief="network limits")] = (
        "Nothing limits the network."
    )
    rule: Annotated[
        str, about("setting that decided; empty when nothing limits the network", brief="network limited by")
    ] = ""
    until: Annotated[
        float | None, about("time at which this ends; null: not known", "s since 1970", brief="network limited until")
    ] = None


@dataclass(frozen=True)
class SensorReading:
    """Current reading of a sensor that a setting uses, such as the battery."""

    name: Annotated[str, about('for people, such as "keyboard and mouse"', brief="sensor")]
    value: Annotated[str, about('such as "idle for 3 minutes", or the reason why it is not known', brief="reading")]
    is_known: Annotated[bool, about("an unknown reading never pauses or slows training")] = True


@dataclass(frozen=True)
class OwnerPolicyStatus:
    """The decisions in effect and the readings behind them."""

    decision: TrainingDecision = TrainingDecision()
    readings: Annotated[tuple[SensorReading, ...], about("what the sensors show", brief="sensor")] = ()
    network: NetworkDecision = NetworkDecision()
    transferred_megabytes: Annotated[
        int, about("sent and received in this calendar month", "MB", gauge="transferred_month_bytes")
    ] = 0
