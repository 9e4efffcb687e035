"""Runs that are compared have one held-out shard, and all of it is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.held_out_shard import held_out_of, shard_windows, with_held_out
from benchmarks.node_process import TOKEN
from benchmarks.prepared_run import build_data
from neuroshard.data.shard_assignment import held_out_shards
from neuroshard.identity import Wallet, parse_token
from neuroshard.runs.proposal import propose_demo, run_parameters
from neuroshard.runs.stored_runs import LocalRuns


def test_a_larger_batch_is_measured_on_the_shard_of_the_other_run(tmp_path: Path) -> None:
    pins, ids = build_data(tmp_path / "genesis", 300)
    run = run_parameters(propose_demo(ids), pins, name="benchmark")
    larger = replace(run, sequences_per_step=3 * run.sequences_per_step)
    found = {with_held_out(larger, shard) for shard in map(held_out_of, (run, replace(run, name="another")))}
    stored = LocalRuns(tmp_path / "data", Wallet.from_secret(parse_token(TOKEN)))
    for one in found:
        assert replace(one, name=larger.name) == larger
        assert next(held_out_shards(stored.create(one).offer.run_id, pins.total_shards)) == held_out_of(one)
    rows = shard_windows(tmp_path / "genesis", run)
    content = (tmp_path / "genesis" / f"shard_{held_out_of(run)}.bin").read_bytes()
    ids_of_rows = rows.flatten().to(torch.uint16).numpy().tobytes()
    assert content.startswith(ids_of_rows)
    assert len(content) - len(ids_of_rows) < 2 * rows.shape[1]
