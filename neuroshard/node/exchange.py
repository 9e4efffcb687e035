"""The round of this node's group. Alone the group is this node, on a transport that nobody else has joined."""

from __future__ import annotations

from typing import assert_never

from torch import Tensor

from neuroshard.aggregation import AggregatorConfig, Mean, Median, TrimmedMean, make_aggregator
from neuroshard.compression import Fp32Codec
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.network import InMemoryNetwork
from neuroshard.swarm.group import Group, RoundDescriptor, aggregator_name
from neuroshard.swarm.outcome import Aborted, Completed
from neuroshard.swarm.round import run_round
from neuroshard.training.outer_sync import Abandoned, Agreed, Exchange
from neuroshard.types import NodeId, RunId


def lone_exchange(node_id: NodeId, run_id: RunId, parameters: OuterOptimization, schema_hash: str) -> Exchange:
    """Rounds of a group of one, through the code that serves every group."""
    transport = InMemoryNetwork().join(node_id)
    group = Group.alone(node_id)
    codec = Fp32Codec()
    config = aggregator_config(parameters)
    aggregator = make_aggregator(config)

    async def exchange(contribution: Tensor, outer_step: int) -> Agreed | Abandoned:
        descriptor = RoundDescriptor(
            run=run_id,
            stage=0,
            outer_step=outer_step,
            codec=codec.name,
            aggregator=aggregator_name(config),
            schema_hash=schema_hash,
        )
        outcome = await run_round(
            transport,
            descriptor,
            group,
            contribution,
            aggregator=aggregator,
            codec=codec,
            deadline_seconds=parameters.max_round_seconds,
        )
        match outcome:
            case Completed():
                return Agreed(outcome.aggregate, len(outcome.members))
            case Aborted():
                return Abandoned(outcome.reason)

    return exchange


def aggregator_config(parameters: OuterOptimization) -> AggregatorConfig:
    """The aggregator that a run's parameters name."""
    match parameters.aggregator:
        case "trimmed_mean":
            return TrimmedMean(parameters.trim_fraction)
        case "median":
            return Median()
        case "mean":
            return Mean()
        case _:
            assert_never(parameters.aggregator)
