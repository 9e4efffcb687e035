"""Five ordinary processes over five short rounds: in each some are killed and as many start, and all stay one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from churn_of_processes import ProcessChurn
from swarm_of_processes import LONGEST_SECONDS, made, nodes_of

from tests.training.churn_plan import churn_plan

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SEED = int(os.environ.get("CHURN_SEED", "1"))
ROUNDS, MEMBERS, SHARE, ROUND_SECONDS = 5, 5, 0.3, 12.0
SHORT = (
    "inner_steps = 100\nbatch_size = 1\nsequences_per_step = 1\narchitecture = { depth = 2, sequence_length = 64 }\n"
)


def test_nodes_that_die_and_come_in_every_round_stay_one_line(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(SHORT, small_genesis, tmp_path)
    with nodes_of(run, quick, tmp_path) as start:
        churn = ProcessChurn(start, SEED)
        try:
            churn.found(MEMBERS)
            first = churn.step
            for plan in churn_plan(SEED, ROUNDS, MEMBERS, SHARE, ROUND_SECONDS):
                churn.carry_out(plan)
            churn.wait("all of one line", lambda: churn.is_settled)
            assert len([step for step in churn.together if step > first]) >= ROUNDS
            split = {step: roots for step, roots in churn.roots.items() if len(roots) > 1}
            assert not split
            for node in churn.live.values():
                node.process.terminate()
            assert [node.process.wait(LONGEST_SECONDS) for node in churn.live.values()] == [0] * len(churn.live)
        except BaseException as failure:
            failure.add_note(f"CHURN_SEED={SEED} makes the same plan again.\n" + "\n".join(churn.events))
            raise
