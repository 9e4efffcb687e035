"""Looking for a run to join: what is waited for is told, and why there is none in the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from trio.testing import MockClock

from benchmarks.friends import befriend
from benchmarks.node_process import TOKEN, NodeProcess, free_port
from neuroshard.config.settings import Settings
from neuroshard.data.data_set import Genesis, open_genesis
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.source import open_source
from neuroshard.data.transfer import FileRequest
from neuroshard.errors import DataError
from neuroshard.identity import Wallet, parse_token
from neuroshard.network import InMemoryNetwork, Network
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.runs.creation import Owner, create_run
from neuroshard.runs.default_run import RUN_FILE, publish_run
from neuroshard.runs.finding import FoundRun, NoRun, RunOrigin
from neuroshard.runs.offer import RunOffer
from neuroshard.status.computer import MemoryStatus
from neuroshard.status.snapshot import ModelStatus, NodeState, NodeStatus
from neuroshard.types import Architecture, LayerRange
from tests.worlds.claims import identity_of
from tests.worlds.clock import at_once

START = 1_700_000_000.0
OWNER = Wallet.from_secret(parse_token(TOKEN))
SEED = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
SHAPE = Architecture(64, 2, 2, 1, 128, 512, 32)
SERVING = NodeStatus(
    "1.2.3",
    START,
    START,
    NodeState.TRAINING,
    "Training.",
    model=ModelStatus(SHAPE, 1000, LayerRange(0, 2), LayerRange(0, 2).roles(2)),
    memory=MemoryStatus(500, 600, "--memory", 400, 300, 350),
)
CONFIG: dict[str, Any] = {"name": "friends", "architecture": {"depth": 2, "sequence_length": 64}}


@pytest.fixture
def genesis(small_genesis: Path, tmp_path: Path) -> Path:
    """A Genesis folder, ours to change."""
    return shutil.copytree(small_genesis, tmp_path / "genesis")


@pytest.fixture
def published(genesis: Path, tmp_path: Path) -> RunOffer:
    """The default run of that data, known to nobody but its owner."""
    offer = create_run(Owner(OWNER, tmp_path / "owner"), CONFIG, str(genesis)).offer
    publish_run(OWNER, offer, genesis, [SEED])
    return offer


def peer_network_of(number: int, everybody: InMemoryNetwork, folder: Path, **settings: Any) -> PeerNetwork:
    me = identity_of(number)

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Network]:
        everybody.join(me.node_id)
        try:
            yield everybody.network_of(me.node_id)
        finally:
            everybody.kill(me.node_id)

    chosen = Settings(data_dir=folder / f"node-{number}", p2p_host="127.0.0.1", **settings)
    chosen.data_dir.mkdir(parents=True, exist_ok=True)
    return PeerNetwork.of(chosen, me, opened, lambda: START + anyio.current_time(), offload=at_once)


class PromptFetcher(Fetcher):
    """Reads a folder without threads, which a virtual clock does not wait for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(open_source(str(folder)))
        self._folder = folder

    async def fetch_bytes(self, request: FileRequest, check: Callable[[bytes], Any]) -> Any:
        try:
            return check((self._folder / request.name).read_bytes())
        except FileNotFoundError:
            raise DataError(f"{request.name} is not there.") from None


async def opened_data(folder: Path, store: Path) -> Genesis:
    fetcher = Fetcher(open_source(str(folder)))
    return await open_genesis(fetcher, store, max_tokenizer_bytes=10**7, give_up_after=1)


def search(folder: Path, genesis: Path, *others: RunOffer, **settings: Any) -> tuple[FoundRun | NoRun, list[Any]]:
    """What a node finds that was told of no run, and what it said meanwhile; the others serve these runs."""
    told: list[Any] = []
    data = trio.run(opened_data, genesis, folder / "store")

    async def main() -> FoundRun | NoRun:
        with InMemoryNetwork() as network:
            seeker = peer_network_of(1, network, folder, **settings)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(seeker.networking.run)
                for number, offer in enumerate(others, 2):
                    other = peer_network_of(number, network, folder)
                    for node in (1, number):
                        wallet = identity_of(node).delegation.grant.wallet_public_key
                        befriend(folder / f"node-{node}", offer, wallet, OWNER)
                    other.serve(offer, lambda: SERVING, is_shared=True)
                    tasks.start_soon(other.networking.run)

                def tell(*words: Any) -> None:
                    told.append(words)

                found = await seeker.finder.suggested(PromptFetcher(genesis), data, tell)
                tasks.cancel_scope.cancel()
        return found

    return trio.run(main, clock=MockClock(autojump_threshold=0)), told


def test_while_the_network_is_asked_for_the_default_run_the_seconds_are_told(
    genesis: Path, published: RunOffer, tmp_path: Path
) -> None:
    found, told = search(tmp_path, genesis)
    assert isinstance(found, NoRun)
    assert "Nobody answered within 20 s for the default run of these data" in found.explanation
    assert "trains a run of its own" in found.explanation
    assert found.explanation.endswith(f"start with --run {published.run_id}")
    asked = [(words, fraction) for words, fraction in told if words.startswith("Asking the network")]
    assert f"default run {published.run_id[:16]} of these data, for 20 s more" in asked[0][0]
    assert len(asked) == 20
    assert [fraction for _, fraction in asked] == pytest.approx([second / 20 for second in range(20)])


def test_a_default_run_that_somebody_knows_is_joined_at_once(
    genesis: Path, published: RunOffer, tmp_path: Path
) -> None:
    found, told = search(tmp_path, genesis, published)
    assert isinstance(found, FoundRun)
    assert (found.offer, found.origin) == (published, RunOrigin.DEFAULT)
    assert found.explanation == f"This computer serves the default run of wallet {OWNER.wallet_id[:8]} of its data set."
    assert len(told) < 5


def test_without_a_network_no_time_is_lost(genesis: Path, published: RunOffer, tmp_path: Path) -> None:
    found, told = search(tmp_path, genesis, network=False)
    assert isinstance(found, NoRun)
    assert f"The network is off and the default run {published.run_id[:16]}" in found.explanation
    assert "start without --no-network" in found.explanation
    assert len(told) == 1


def test_data_without_a_default_run_say_how_to_join_one(genesis: Path, tmp_path: Path) -> None:
    found, told = search(tmp_path, genesis)
    assert isinstance(found, NoRun)
    assert found.explanation.startswith("These data name no default run, so this computer trains a run of its own.")
    assert "--invite LINK" in found.explanation
    assert len(told) == 1  # on loopback nobody is listened for


def test_a_run_of_a_given_peer_is_listened_for(genesis: Path, published: RunOffer, tmp_path: Path) -> None:
    (genesis / RUN_FILE).unlink()
    found, _ = search(tmp_path / "a", genesis, published, peer=[SEED])
    assert isinstance(found, FoundRun)
    assert found.origin is RunOrigin.NEARBY
    alone, told = search(tmp_path / "b", genesis, peer=[SEED])
    assert isinstance(alone, NoRun)
    assert "no node nearby reports one" in alone.explanation
    assert sum("for a node nearby" in words for words, _ in told) == 3


# Starts a node that asks for the default run for three seconds instead of twenty.
IMPATIENT = """
from neuroshard.cli.main import main
from neuroshard.runs import finding
finding.DEFAULT_RUN_SECONDS = 3.0
main()
"""


@contextmanager
def impatient_node(data_dir: Path, genesis: Path) -> Iterator[NodeProcess]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
    environment |= {"NEUROSHARD_TOKEN": "ab" * 32, "NEUROSHARD_P2P_HOST": "127.0.0.1"}
    port = free_port()
    arguments = ["--headless", "--port", port, "--data-dir", data_dir, "--genesis", genesis, "--memory", "500"]
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *map(str, arguments), "--cpu-threads", "1"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield NodeProcess(process, port, data_dir, time.perf_counter())
    finally:
        process.kill()
        process.wait()


@pytest.mark.process
def test_the_status_of_a_real_node_says_what_it_waits_for_and_why_it_trains_alone(
    genesis: Path, published: RunOffer, tmp_path: Path
) -> None:
    with impatient_node(tmp_path / "node", genesis) as node:
        asking = node.wait_for("question", lambda status: "Asking the network" in status["state_reason"])
        assert asking["state"] == "starting"
        assert f"default run {published.run_id[:16]} of these data, for " in asking["state_reason"]
        stages = {stage["name"]: stage for stage in asking["startup"]}
        assert list(stages)[2:4] == ["Opening the training data", "Finding the run"]
        assert stages["Finding the run"]["detail"] == asking["state_reason"]
        trained = node.wait_for("run", lambda status: status["run"] is not None)
        assert trained["run"]["is_own"]
        assert "Nobody answered within 3 s" in trained["run"]["explanation"]
        assert f"--run {published.run_id}" in trained["run"]["explanation"]
        node.wait_for_steps(1)
        assert json.loads((genesis / RUN_FILE).read_text())["run_id"] == published.run_id
