"""Replicas in one stack of weights learn what the product's model and optimizer learn one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.laboratory import INNER, SHAPE, new_executor
from benchmarks.stacked import StackedReplicas
from neuroshard.config.run_parameters import InnerOptimizerName
from neuroshard.model.weights import flatten

STEPS, BATCH = 5, 2
RATES = (1e-3, 4e-3, 2e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_replica_of_a_stack_makes_the_steps_of_the_node(optimizer: InnerOptimizerName) -> None:
    inner = replace(INNER, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, len(RATES), BATCH, SHAPE.sequence_length + 1)
    rows = torch.randint(SHAPE.vocabulary_size, shape, generator=generator)
    executors = [new_executor(seed, inner) for seed in range(len(RATES))]
    stack = StackedReplicas([executor.model for executor in executors], inner)
    before = stack.weights.clone()
    for step in range(STEPS):
        stack.step(rows[step], torch.tensor(RATES))
        for replica, executor in enumerate(executors):
            mine = rows[step, replica]
            executor.loss(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())
            executor.step(RATES[replica], INNER.max_grad_norm, BATCH * SHAPE.sequence_length)
    alone = torch.stack([flatten(executor.model) for executor in executors])
    assert (before - alone).abs().max() > 1e-3
    apart = (stack.weights - alone).abs()
    # Where a gradient is almost zero, AdamW's first steps turn its rounding into a part of the learning rate.
    assert apart.max() < max(RATES) / 40
    assert apart.mean() < 1e-7
