"""Who is there and how rounds between them go. Decisions are pure; messages go through a Transport."""

from neuroshard.swarm.group import Group, RoundDescriptor, aggregator_name, round_id
from neuroshard.swarm.outcome import Aborted, AbortKind, Completed, RefusedMember, RoundOutcome
from neuroshard.swarm.round import Offload, run_round
from neuroshard.swarm.schedule import round_is_due

__all__ = [
    "AbortKind",
    "Aborted",
    "Completed",
    "Group",
    "Offload",
    "RefusedMember",
    "RoundDescriptor",
    "RoundOutcome",
    "aggregator_name",
    "round_id",
    "round_is_due",
    "run_round",
]
