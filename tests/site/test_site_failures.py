"""A rank that ends or hangs: the node names it, drops its step, and starts the ranks again, or pauses in the end."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import torch
import torch.distributed
import trio

from neuroshard.cli.failures import ExitCode, exit_code
from neuroshard.consensus.group_rounds import GroupRounds
from neuroshard.errors import SiteRestartError
from neuroshard.network import InMemoryNetwork
from neuroshard.pipeline.control import Control
from neuroshard.pipeline.executor import ComputeThread, PassResult, Precision
from neuroshard.pipeline.microbatch import SiteFailedError
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.status.snapshot import NodeState
from neuroshard.training.site.commands import PassKind
from neuroshard.training.site.meeting_folder import remove_abandoned_folders
from neuroshard.training.site.plan import SitePlan
from neuroshard.training.site.rank_processes import end_words, rank_environment
from neuroshard.training.site.site import PassPart, Site, WaveKind
from neuroshard.training.stage_checkpoint import build_stage
from neuroshard.training.trainer import Trainer
from tests.worlds.stages import IDENTITY, INPUTS, LABELS, PARAMETERS, MemoryFeed, make_trainer
from tests.worlds.trainers import NAMES, TOGETHER, Node, node_of, trained_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX"),
]
PINS = replace(PARAMETERS.genesis, root="0" * 64, tokenizer_sha256="0" * 64)
RUN = replace(PARAMETERS, genesis=PINS)
SECONDS = 60


@contextmanager
def training(folder: Path, timeout_seconds: float = 30, *, mode: str = "replicate") -> Iterator[tuple[Site, Trainer]]:
    site = Site(SitePlan(2), 2, "cpu", threads=1, timeout_seconds=timeout_seconds)
    site.begin()
    site.plan_stages(is_sharded=mode == "shard")
    compute = ComputeThread(1, wave=site)
    try:
        stage = compute.submit(
            lambda: build_stage(
                RUN, IDENTITY, torch.device("cpu"), CheckpointStore(folder), precision=Precision.FP32, site=site
            )
        ).result(SECONDS)
        yield site, make_trainer(compute, stage, MemoryFeed(stage.record.progress.position))
    finally:
        compute.close()
        site.close()


def run(trainer: Trainer, beside: Callable[[], Any], last_step: int | None) -> None:
    async def main() -> None:
        with anyio.fail_after(4 * SECONDS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(trainer.run, last_step)
                await beside()

    trio.run(main)


async def steps_reach(trainer: Trainer, steps: int) -> None:
    while trainer.steps < steps:
        await anyio.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "rank 1 ended: signal 9"), (signal.SIGSTOP, "rank 1: no answer for 3 s")]
)
def test_training_goes_on_after_a_rank_has_failed(
    number: signal.Signals, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with training(tmp_path, timeout_seconds=3) as (site, trainer):
        pids = list[int]()

        async def strike() -> None:
            await steps_reach(trainer, 3)
            began = time.monotonic()
            pids.append(site.pids[1])
            os.kill(site.pids[1], number)
            await steps_reach(trainer, 8)
            assert time.monotonic() - began < 30 + SECONDS / 2  # 30 s are the goal on an idle computer

        run(trainer, strike, 8)
        assert site.incarnation == 2
        assert site.pids[1] != pids[0]
    assert f"The site has failed: {reason}. Its ranks start again." in caplog.messages
    assert not psutil.pid_exists(pids[0])


def test_a_divided_stage_continues_from_its_newest_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rank takes its part of the weights with it: the stage goes back, and no save sees a lost tensor."""
    caplog.set_level(logging.WARNING)
    with training(tmp_path, mode="shard") as (site, trainer):
        saved = list[int]()

        async def strike() -> None:
            await steps_reach(trainer, 3)
            await trainer.save_now()
            saved.append(CheckpointStore(tmp_path).generations()[0].step)
            await steps_reach(trainer, saved[0] + 4)
            os.kill(site.pids[1], signal.SIGKILL)
            while site.incarnation == 1 or trainer.steps >= saved[0] + 4:
                await anyio.sleep(0.002)
            await steps_reach(trainer, saved[0] + 6)
            trainer.stop()

        run(trainer, strike, None)
        assert site.incarnation == 2
    assert "The site has failed: rank 1 ended: signal 9. Its ranks start again." in caplog.messages
    assert f"The checkpoint of step {saved[0]} was restored." in caplog.messages
    newest = CheckpointStore(tmp_path).generations()[0]
    assert newest.step >= saved[0] + 6
    with training(tmp_path, mode="replicate") as (_, again):  # the file has the state of both ranks
        assert again.steps == newest.step
        run(again, partial(steps_reach, again, newest.step + 1), newest.step + 1)


def test_an_error_of_rank_0_in_a_divided_pass_names_rank_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other rank waits for the rest of the pass and has done nothing wrong; training goes on after a restart."""
    caplog.set_level(logging.WARNING)
    with training(tmp_path, mode="shard") as (site, trainer):

        async def strike() -> None:
            await steps_reach(trainer, 2)
            stage = trainer.parts.stages[0]
            began = time.monotonic()
            with pytest.raises(SiteFailedError, match=r"^rank 0: Expected .*indices.*FloatTensor"):
                await stage.service.compute.run(lambda: stage.executor.infer(INPUTS[:4].float()))
            assert time.monotonic() - began < 15  # of the 30 s that a rank waits for another one
            while site.incarnation == 1:
                await anyio.sleep(0.002)
            await steps_reach(trainer, trainer.steps + 1)
            trainer.stop()

        run(trainer, strike, None)
        assert site.incarnation == 2
    assert any("The site has failed: rank 0: Expected" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("a cache is full.\nMore."), "rank 0: a cache is full"),
        (KeyError(), "rank 0: KeyError"),
        (torch.OutOfMemoryError("no 2 GiB"), "rank 0: out of memory"),
        (torch.AcceleratorError("the launch timed out"), "rank 0: the launch timed out"),
        (torch.distributed.DistNetworkError("the other side has gone"), "rank 1: the connection has ended"),
        (RuntimeError("[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), "rank 1: the connection has"),
        (RuntimeError("[x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms"), "rank 1: no answer for"),
    ],
)
def test_any_error_while_ranks_wait_is_a_failure_of_the_site(error: Exception, reason: str) -> None:
    site = Site(SitePlan(2), 2, "cpu", threads=1)
    site.begin()
    try:
        with pytest.raises(SiteFailedError), site.failing():
            raise error
        assert site.failure.startswith(reason)
    finally:
        site.close()


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_an_error_of_another_rank_names_that_rank(mode: str, tmp_path: Path) -> None:
    with training(tmp_path, mode=mode) as (site, trainer):
        executor: Any = trainer.parts.stages[0].executor
        kind = WaveKind(executor.stage, PassKind.LOSS, Precision.FP32, True, ())
        wrong = PassPart(kind, (INPUTS[:4].float(), LABELS[:4], None), 1, PassResult)
        job = trainer.parts.stages[0].service.compute.submit(lambda: site.add(executor, wrong, 1))
        with pytest.raises(SiteFailedError, match=r"^rank 1 ended: Expected .*indices.*FloatTensor"):
            job.result(SECONDS)


def test_a_divided_stage_has_a_checkpoint_before_its_first_step(tmp_path: Path) -> None:
    with training(tmp_path, mode="shard") as (_, trainer):

        async def look() -> None:
            await steps_reach(trainer, 1)
            assert 0 in [generation.step for generation in CheckpointStore(tmp_path).generations()]

        run(trainer, look, 1)


def test_the_restarted_rank_has_the_weights_of_the_node(tmp_path: Path) -> None:
    """After the failure, the loss of a microbatch is that of rank 0's weights on both ranks."""
    with training(tmp_path) as (site, trainer):

        async def strike() -> None:
            await steps_reach(trainer, 2)
            os.kill(site.pids[1], signal.SIGKILL)
            await steps_reach(trainer, 4)

        run(trainer, strike, 4)
        executor: Any = trainer.parts.stages[0].executor
        compute = trainer.parts.stages[0].service.compute
        shapes = StageShapes.of(executor.model, 8)
        jobs = [compute.submit(lambda: executor.loss_pass(shapes, INPUTS[:4], LABELS[:4])) for _ in range(2)]
        here, there = (job.result(SECONDS).loss_sum for job in jobs)
        assert here.item() == there.item()


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_no_round_waits_for_a_node_whose_ranks_start_again(mode: str, tmp_path: Path) -> None:
    """The node with the site leaves the rounds while a rank restarts. Afterwards both agree on new states again."""
    site = Site(SitePlan(2), 2, "cpu", threads=1, timeout_seconds=30)
    site.begin()
    site.plan_stages(is_sharded=mode == "shard")
    computes = ComputeThread(1, wave=site), ComputeThread(1)
    seen, rounds = list[tuple[bool, bool]](), list[int]()

    async def strike(group: GroupRounds, control: Control, nodes: list[Node]) -> None:
        while not nodes[0].anchors:
            await anyio.sleep(0.01)
        await nodes[0].trainer.save_now()  # a divided stage goes back to it
        os.kill(site.pids[1], signal.SIGKILL)
        while not control.restarting:
            await anyio.sleep(0.001)
        while control.restarting:
            seen.append((group.replica_status().is_ready, group.in_round))
            await anyio.sleep(0.01)
        rounds.append(len(nodes[1].anchors))

    async def main() -> None:
        with InMemoryNetwork() as network, anyio.fail_after(3 * SECONDS):
            nodes = [
                node_of(compute, tmp_path, name, network, shard, parameters=replace(TOGETHER, genesis=PINS), site=ranks)
                for shard, (compute, name, ranks) in enumerate(zip(computes, NAMES, (site, None), strict=True))
            ]
            held = nodes[0].trainer.parts.stages[0]
            assert held.group is not None

            def have_met() -> bool:
                new = nodes[1].anchors[rounds[0] + 1 :] if rounds else []
                return any(torch.equal(nodes[0].anchors[-1], anchor) for anchor in new) or must_download()

            def must_download() -> bool:
                """Whether the other node has completed a round since the checkpoint of a divided stage."""
                return mode == "shard" and held.group is not None and held.group.must_follow.is_set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(strike, held.group, held.control, nodes)
                await trained_until(have_met, nodes)

    try:
        trio.run(main)
    finally:
        for compute in computes:
            compute.close()
        site.close()
    assert site.incarnation == 2
    assert set(seen) == {(False, False)}


def test_the_fourth_failure_pauses_with_the_reason(tmp_path: Path) -> None:
    with training(tmp_path) as (site, trainer):

        async def strike() -> None:
            struck = 0
            await steps_reach(trainer, 1)
            while trainer.snapshot().state is not NodeState.PAUSED:
                if site.incarnation > struck and not site.failure:
                    struck = site.incarnation
                    os.kill(site.pids[1], signal.SIGKILL)
                await anyio.sleep(0.01)
            assert struck == 4
            reason = trainer.snapshot().reason
            assert "rank 1 ended: signal 9, after 3 starts of the ranks within 10 minutes" in reason
            before = trainer.steps
            trainer.resume()
            await steps_reach(trainer, before + 1)  # the owner's Resume counts again
            trainer.stop()

        run(trainer, strike, None)
        assert site.incarnation == 5


def test_ranks_end_within_five_seconds_of_rank_0(tmp_path: Path) -> None:
    """Killed, rank 0 leaves its folder behind; the next start removes it, and no folder of a node that runs."""
    program = (
        "import time\n"
        "from neuroshard.training.site.plan import SitePlan\n"
        "from neuroshard.training.site.site import Site\n"
        "site = Site(SitePlan(3), 3, 'cpu', threads=1)\n"
        "site.begin()\n"
        "print(*site.pids.values(), flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    node = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert node.stdout is not None
        pids = [int(pid) for pid in node.stdout.readline().split()]
        assert len(pids) == 2
        ranks = [psutil.Process(pid) for pid in pids]
        (folder,) = tmp_path.glob("neuroshard-site-*")
        remove_abandoned_folders(tmp_path)
        assert folder.exists()
        node.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=5)
        assert (len(gone), alive) == (2, [])
        node.wait()
        assert folder.exists()
        remove_abandoned_folders(tmp_path)
        assert not folder.exists()
    finally:
        node.kill()
        node.wait()
        if node.stdout is not None:
            node.stdout.close()


def test_a_folder_with_a_number_stays_only_while_its_process_lives(tmp_path: Path) -> None:
    own, reused, old, other = (
        tmp_path / name
        for name in (
            f"neuroshard-site-{os.getpid()}-a",
            f"neuroshard-site-{os.getpid()}-b",
            "neuroshard-site-x1y2",
            "else",
        )
    )
    for folder in (own, reused, old, other):
        folder.mkdir()
    born = psutil.Process().create_time()
    os.utime(reused, (born - 1000, born - 1000))  # made by an earlier process of this number
    remove_abandoned_folders(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {own.name, old.name, other.name}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.usefixtures("own_ranks")
def test_a_rank_has_no_token_and_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEUROSHARD_TOKEN", "a secret of the node")
    monkeypatch.setenv("NEUROSHARD_DATA_DIR", "/a/folder")
    site = Site(SitePlan(2), 2, "cpu", threads=1)
    site.begin()
    try:
        rank = Path(f"/proc/{site.pids[1]}")
        shown = (rank / "environ").read_bytes() + (rank / "cmdline").read_bytes()
        assert b"NEUROSHARD_" not in shown
        assert b"a secret of the node" not in shown
        addresses = {c.laddr.ip for c in psutil.Process(site.pids[1]).net_connections("inet")}
        assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    finally:
        site.close()


def test_the_environment_of_a_rank_has_no_launcher() -> None:
    given = {"PATH": "/bin", "RANK": "0", "MASTER_ADDR": "x", "NEUROSHARD_TOKEN": "t"}
    assert rank_environment(given) == {"PATH": "/bin"}


def test_words_for_an_end() -> None:
    assert end_words(-9) == "signal 9"
    assert end_words(3) == "exit code 3"


def test_under_a_launcher_the_launcher_starts_the_ranks_again() -> None:
    site = Site(SitePlan(2, launcher="torchrun", address="127.0.0.1", port=1), 2, "cpu", threads=1)
    site.failure = "rank 1: the connection has ended"
    with pytest.raises(SiteRestartError, match=r"rank 1: the connection has ended\. The launcher must") as raised:
        site.restart()
    assert exit_code(raised.value) is ExitCode.RESTART == 7
