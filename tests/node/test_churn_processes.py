"""Five ordinary processes over two short rounds: in each some die, come or err, and all stay one line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.worlds.churn import RoundPlan, churn_plan, wrong_clock
from tests.worlds.processes import LONGEST_SECONDS, ProcessChurn, loopback_lines, made, nodes_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SEED = int(os.environ.get("CHURN_SEED", "1"))
ROUNDS, MEMBERS, SHARE, ROUND_SECONDS = 2, 5, 0.3, 8.0
GENTLE = {"NEUROSHARD_CPU_PERCENT": "20"}  # five share this computer
SHORT = "inner_steps = 50\nbatch_size = 1\nsequences_per_step = 1\narchitecture = { depth = 2, sequence_length = 64 }\n"


@pytest.mark.long
def test_nodes_that_die_and_come_in_every_round_stay_one_line(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(SHORT, small_genesis, tmp_path)
    with loopback_lines() as lines, nodes_of(run, quick, tmp_path, GENTLE) as start:
        churn = ProcessChurn(start, SEED, lines, tmp_path / "clocks")
        try:
            churn.found(MEMBERS)
            first = churn.step
            for plan in plan_with_a_wrong_clock():
                churn.carry_out(plan)
            churn.wait("all of one line", lambda: churn.is_settled)
            assert len([step for step in churn.together if step > first]) >= ROUNDS
            split = {step: roots for step, roots in churn.roots.items() if len(roots) > 1}
            assert not split
            assert lines.slow_pieces
            assert churn.refused
            for node in churn.refused:
                assert node.warning.startswith("This computer's clock ")
                assert "Set the clock" in node.warning
                assert not node.rounds
            for node in churn.live.values():
                node.process.terminate()
            assert [node.process.wait(LONGEST_SECONDS) for node in churn.live.values()] == [0] * len(churn.live)
        except BaseException as failure:
            failure.add_note(f"CHURN_SEED={SEED} makes the same plan again.\n" + "\n".join(churn.events))
            raise


def plan_with_a_wrong_clock() -> list[RoundPlan]:
    """The seed's plan, in which the first who comes has a clock that is too wrong."""
    first, *others = churn_plan(SEED, ROUNDS, MEMBERS, SHARE, ROUND_SECONDS)
    comer = replace(first.comings[0], clock_ahead=wrong_clock(Random(SEED)))
    return [replace(first, comings=(comer, *first.comings[1:])), *others]
