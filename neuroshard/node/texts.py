"""How this node continues texts with the run's model: with its own stages alone, or with those of the swarm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count

from neuroshard.data.tokenizer import Tokenizer
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.pipeline.compute_thread import ComputeThread
from neuroshard.pipeline.routing import ChoiceInTurn, SwarmRouting
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.training.text_generation import (
    InferenceSession,
    LocalInferenceSession,
    SwarmInferenceSession,
    TextGenerator,
)
from neuroshard.types import Architecture


def text_generator(
    architecture: Architecture,
    tokenizer: Tokenizer,
    swarm: StageSwarm,
    compute: ComputeThread,
    held: Sequence[StageServer],
) -> TextGenerator:
    """Continues texts; `held` are the stages of this node in the order of their layers."""
    if len(held) == len(swarm.plan):
        begin = partial(LocalInferenceSession, compute, [service.texts for service in held], swarm.node_id)
        return TextGenerator(architecture, tokenizer, begin)
    sessions = count(1)
    routing = SwarmRouting(len(swarm.plan), swarm.workers, swarm.hop, ChoiceInTurn(swarm.node_id), swarm.missing)

    def begin_in_swarm() -> InferenceSession:
        return SwarmInferenceSession(routing, next(sessions), swarm.missing)

    return TextGenerator(architecture, tokenizer, begin_in_swarm)
