"""How this node continues texts with the run's model: with its own stages alone, or with those of the swarm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count

from neuroshard.data.tokenizer import Tokenizer
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.training.compute import ComputeThread
from neuroshard.training.generation import Reading, TextGenerator
from neuroshard.training.replica_choice import ChoiceInTurn
from neuroshard.training.stage_service import StageService
from neuroshard.training.swarm_routing import SwarmRouting
from neuroshard.training.text_reading import LocalReading, SwarmReading
from neuroshard.types import Architecture


def text_generator(
    architecture: Architecture,
    tokenizer: Tokenizer,
    swarm: StageSwarm,
    compute: ComputeThread,
    held: Sequence[StageService],
) -> TextGenerator:
    """Continues texts; `held` are the stages of this node in the order of their layers."""
    if len(held) == len(swarm.plan):
        begin = partial(LocalReading, compute, [service.texts for service in held], swarm.node_id)
        return TextGenerator(architecture, tokenizer, begin)
    sessions = count(1)
    routing = SwarmRouting(len(swarm.plan), swarm.workers, swarm.hop, ChoiceInTurn(swarm.node_id), swarm.missing)

    def begin_in_swarm() -> Reading:
        return SwarmReading(routing, next(sessions), swarm.missing)

    return TextGenerator(architecture, tokenizer, begin_in_swarm)
