"""`--demo` means the demo that runs, whatever text it trains on; a demo that cannot run is refused before it builds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.node_process import NodeProcess, free_port
from neuroshard.cli.options import node_folder
from neuroshard.config.instance_lock import FILE_NAME, InstanceLock
from neuroshard.errors import UsageError
from neuroshard.node.demo import DemoOptions, FurtherNodes, demo_folder, demo_token, node_command
from tests.worlds.commands import Command

pytestmark = pytest.mark.process
PEER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.fixture
def demo_of_text(neuroshard: Command, small_text: Path) -> Iterator[NodeProcess]:
    """A running `demo --text FOLDER` of this user."""
    neuroshard.home.mkdir()
    port = free_port()
    meant_for_a_node = neuroshard.having(NEUROSHARD_RUN="ab" * 32, NEUROSHARD_PEER=PEER)
    folder = demo_folder(neuroshard.home / ".local/share/neuroshard", DemoOptions(text_folder=small_text))
    limits = ("--cpu-threads", 1, "--inner-steps", 7, "--max-storage", 50, "--no-training")
    command = neuroshard.arguments("demo", "--text", small_text, "--headless", "--port", port, *limits)
    with subprocess.Popen(
        command, env=meant_for_a_node.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield NodeProcess(process, port, folder, 0.0)
        finally:
            process.kill()


def test_a_demo_of_own_text_is_found_asked_and_stopped(neuroshard: Command, demo_of_text: NodeProcess) -> None:
    demo_of_text.wait_for("rest", lambda status: status["state"] == "paused")
    assert neuroshard("resume", "--demo").code == 0
    demo_of_text.wait_for_steps(1)
    shown = neuroshard("status", "--demo", "--json")
    assert shown.code == 0, shown.err
    assert shown.json()["is_demo"]
    speed = shown.json()["acceleration"]
    assert (speed["device"], speed["peak_source"]) == ("CPU", "measured")
    assert speed["flops_per_second"] == pytest.approx(speed["tokens_per_second"] * speed["flops_per_token"])
    assert 0 < speed["mfu"] < 1
    assert speed["mode"] is None
    assert speed["compile"] == {"state": "off", "reason": "nothing is compiled for the device cpu"}
    assert shown.json()["diloco"]["inner_steps_total"] == 7
    settings = demo_of_text.get("/api/config")
    assert [settings[key]["value"] for key in ("max_storage", "run", "peer")] == [50, None, []]
    logged = [line for line in neuroshard("logs", "--demo").out.splitlines() if "is ignored" in line]
    assert len(logged) == 1
    assert (
        "WARNING A demo trains a run of its own: the run to join in NEUROSHARD_RUN and NEUROSHARD_PEER is" in logged[0]
    )
    stopped = neuroshard("stop", "--demo", "--json")
    assert stopped.code == 0, stopped.err
    assert stopped.json() == {"state": "stopped", "message": "Stopped."}
    assert demo_of_text.process.wait(20) == 0
    listed = neuroshard("checkpoint", "list", "--demo")  # of the demo that ran last
    assert "step" in listed.out
    assert neuroshard("status", "--demo").code == 4


def test_the_other_nodes_of_a_demo_keep_to_its_limits(tmp_path: Path) -> None:
    invitation = tmp_path / "demo.neuroshard-invitation"
    shared = FurtherNodes(invitation, "http://127.0.0.1:1", max_storage=50, is_training=False)
    command = node_command(tmp_path, shared, threads=1)
    assert command[command.index("--invite") + 1] == str(shared.invitation)
    assert "--no-training" in command
    assert command[command.index("--max-storage") + 1] == "50"
    assert "--max-stages" not in command


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("text", [None, Path("text")])
def test_a_demo_with_any_options_is_found(tmp_path: Path, stages: int, text: Path | None) -> None:
    demo_token(demo_folder(tmp_path, DemoOptions()))
    folder = demo_folder(tmp_path, DemoOptions(nodes=stages, stages=stages, text_folder=text))
    places = (folder, folder / "node-2")  # the first node, and another one of its swarm
    for place in places:
        demo_token(place)
    locks = [InstanceLock.acquire(place) for place in places]
    assert node_folder(tmp_path, demo=True) == folder
    for lock in locks:
        lock.release()


def test_of_several_demos_one_must_be_named(tmp_path: Path) -> None:
    embedded, own = (demo_folder(tmp_path, DemoOptions(text_folder=text)) for text in (None, tmp_path / "text"))
    assert node_folder(tmp_path, demo=True) == embedded  # when there never was any
    for folder in (embedded, own):
        demo_token(folder)
        InstanceLock.acquire(folder).release()
    os.utime(embedded / FILE_NAME, (1.0, 1.0))
    assert node_folder(tmp_path, demo=True) == own  # it ran last
    lock = InstanceLock.acquire(embedded)
    assert node_folder(tmp_path, demo=True) == embedded  # it runs
    other = InstanceLock.acquire(own)
    with pytest.raises(UsageError, match="Several demos are running") as refused:
        node_folder(tmp_path, demo=True)
    assert {str(embedded), str(own)} <= set(refused.value.message.removesuffix(".").replace(":", ",").split(", "))
    lock.release()
    other.release()
    assert node_folder(tmp_path, demo=False) == tmp_path


@pytest.mark.parametrize("more", [(), ("--nodes", "2", "--stages", "2")])
def test_too_little_memory_is_told_before_anything_is_built(neuroshard: Command, more: tuple[str, ...]) -> None:
    outcome = neuroshard("demo", "--memory", "100", "--headless", "--port", "0", *more)
    assert outcome.code != 0
    assert "MB of memory here, but only 0 MB may be used" in outcome.err
    assert "--memory" in outcome.err
    assert not list(neuroshard.home.rglob("genesis*"))
