"""Ordinary processes of one run on loopback, and what is asked of them again and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.node_process import TOKEN, NodeProcess, running_node

LONGEST_SECONDS = 150.0  # this machine may be busy


@dataclass(frozen=True)
class Run:
    """A run that `neuroshard run create` made, in its owner's data folder."""

    run_id: str
    data_dir: Path


def neuroshard(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with the owner's token."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
    environment |= {"NEUROSHARD_TOKEN": TOKEN, "NEUROSHARD_P2P_HOST": "127.0.0.1"}
    command = [sys.executable, "-m", "neuroshard", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def made(config: str, genesis: Path, folder: Path) -> Run:
    file, data_dir = folder / "run.toml", folder / "owner"
    file.write_text(f'name = "friends"\n{config}')
    where = ("--genesis", genesis, "--data-dir", data_dir, "--out", folder / "signed.json", "--json")
    created = neuroshard("run", "create", "--config", file, *where)
    assert created.returncode == 0, created.stderr
    return Run(json.loads(created.stdout)["run_id"], data_dir)


@contextmanager
def nodes_of(
    run: Run, quick: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[Callable[..., NodeProcess]]:
    """Starts nodes of a run, each with a folder and a wallet of its own; all are gone when the block ends."""
    started: list[tuple[NodeProcess, Any]] = []

    def start(number: int, *peers: str, run_id: str = run.run_id, place: Sequence[str] = ()) -> NodeProcess:
        data_dir = run.data_dir if number == 0 else folder / f"node-{number}"
        given = [part for peer in peers for part in ("--peer", peer)]
        token = {} if number == 0 else {"NEUROSHARD_TOKEN": f"{number:02x}" * 32}
        told = {**token, **(variables or {})}
        context = running_node(data_dir, [*quick, "--run", run_id, *given], variables=told, place=place)
        node = context.__enter__()
        started.append((node, context))
        return node

    try:
        yield start
    finally:
        for node, context in started:
            node.kill()  # nobody waits for checkpoints here
            context.__exit__(None, None, None)


def peers_of(node: NodeProcess) -> dict[str, dict[str, Any]]:
    """What a node says about each other node; nothing while it does not answer."""
    try:
        return {peer["node_id"]: peer for peer in node.get("/api/peers")["peers"]}
    except httpx.HTTPError:
        return {}


def until(event: str, holds: Callable[[], bool], seconds: float = LONGEST_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {event}"
        time.sleep(0.2)


def steps_of(node: NodeProcess) -> int:
    return int(node.get("/api/status")["training"]["steps"])


def all_train_on(nodes: Sequence[NodeProcess]) -> None:
    before = [steps_of(node) for node in nodes]
    until("new steps everywhere", lambda: all(steps_of(node) > was for node, was in zip(nodes, before, strict=True)))
