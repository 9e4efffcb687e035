"""Ordinary processes whose CDN dies after the first of them has the data: the second one trains all the same."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from benchmarks.node_process import NodeProcess
from neuroshard.dataset import GenesisServer
from tests.worlds.processes import LONGEST_SECONDS, all_train_on, made, nodes_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SMALL = "batch_size = 1\nsequences_per_step = 1\narchitecture = { depth = 2, sequence_length = 64 }\n"


def data_of(node: NodeProcess) -> dict[str, object]:
    """What a node says of its data; nothing while it does not answer."""
    try:
        return dict(node.get("/api/data")["data"] or {})
    except httpx.HTTPError:
        return {}


def test_a_node_joins_and_trains_on_what_another_node_has_when_the_cdn_is_dead(
    small_genesis: Path, tmp_path: Path
) -> None:
    run = made(SMALL, small_genesis, tmp_path)
    quick = ["--memory", "500", "--cpu-threads", "1", "--inner-steps", "500"]
    with GenesisServer(small_genesis) as cdn:
        quick += ["--genesis", cdn.url]
        with nodes_of(run, quick, tmp_path) as start:
            first = start(0)
            until("all shards at the first node", lambda: data_of(first).get("cached_shards") == 16, LONGEST_SECONDS)
            cdn.stop()
            status = first.wait_for("address", lambda told: bool(told["network"]["addresses"]), LONGEST_SECONDS)
            second = start(1, status["network"]["addresses"][0])
            until("data from the first node", lambda: int(str(data_of(second).get("files_from_nodes") or 0)) >= 4)
            all_train_on([first, second])
            assert data_of(second)["verified"]
