"""Real material for tests that start real processes, made once for all of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from pydoc_data import topics
from ssl import SSLContext
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import anyio.to_thread
import pytest
from httpx import create_ssl_context
from httpx._transports import default
from hypothesis import settings

from benchmarks import preloaded

if TYPE_CHECKING:
    from neuroshard.pipeline.executor import ComputeThread
    from tests.worlds.commands import Command

settings.register_profile("no clock", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("no clock")

os.environ[preloaded.VARIABLE] = "1"  # imports are most of the start of a node or a command
os.environ.update(preloaded.THREADS)  # more threads than cores wait for each other, which costs more than they compute

TEXT_BYTES = 150_000
# Checkpoints as often as the ten steps between two of them allow, so that a test need not wait for the clock.
SAVING_OFTEN = {"NEUROSHARD_CHECKPOINT_MIN_SECONDS": "0", "NEUROSHARD_CHECKPOINT_WRITE_GB_PER_DAY": "1000000"}


def pytest_configure() -> None:
    """Training yields to other programs, so it would wait for other tests. A niceness of the tests decides instead."""
    if hasattr(os, "nice") and os.nice(0) == 0:
        os.nice(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Processes and browsers first where workers share the tests, each a part of the list: they wait, others compute.

    So one worker is at processes while another computes, and no long test is left for the end.
    """
    if hasattr(config, "workerinput"):  # set by xdist, for a worker
        items.sort(key=lambda item: not any(map(item.get_closest_marker, ("process", "browser"))))


@pytest.fixture(scope="session", autouse=True)
def unflushed() -> Iterator[None]:
    """Nothing waits for the disk: only a power cut would lose what was written, and no test makes one."""

    def stay(_descriptor: int) -> None:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", stay)
        yield


@pytest.fixture(scope="session", autouse=True)
def roots_read_once() -> Iterator[None]:
    """Clients share what they trust: reading all roots of TLS takes 70 ms of CPU for each."""

    @cache
    def remembered(_variables: tuple[str | None, ...], trust_env: bool) -> SSLContext:
        return create_ssl_context(trust_env=trust_env)

    def shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> SSLContext:
        if verify is not True or cert is not None:
            return create_ssl_context(verify=verify, cert=cert, trust_env=trust_env)
        return remembered(tuple(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")), trust_env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", shared)
        yield


@pytest.fixture
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent to a worker thread runs at once: a clock that jumps would not wait for a thread."""

    async def run_inline(work: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return work(*arguments)

    monkeypatch.setattr(anyio.to_thread, "run_sync", run_inline)


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    """A compute thread with one CPU thread, joined at the end of the test."""
    from neuroshard.pipeline.executor import ComputeThread

    thread = ComputeThread(cpu_threads=1)
    yield thread
    thread.close()


@pytest.fixture
def neuroshard(tmp_path: Path) -> Command:
    """`neuroshard` with a home folder of its own and nothing of NeuroShard in the environment."""
    from tests.worlds.commands import Command

    return Command(tmp_path / "home")


@pytest.fixture(scope="session")
def small_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with about 150 kB of real English text."""
    folder = tmp_path_factory.mktemp("text")
    written = 0
    for name, text in sorted(topics.topics.items()):
        if written < TEXT_BYTES:
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")
            written += len(text)
    return folder


@pytest.fixture(scope="session")
def small_genesis(small_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed Genesis folder: 16 shards of about 5,000 tokens, so that a shard lasts ten steps of one sequence."""
    from benchmarks.node_process import TOKEN
    from neuroshard.dataset import BuildOptions, FolderText, build_genesis
    from neuroshard.identity import Wallet, parse_token

    folder = tmp_path_factory.mktemp("genesis") / "small"
    options = BuildOptions(vocabulary=400)
    wallet = Wallet.from_secret(parse_token(TOKEN))
    build_genesis(FolderText(small_text), folder, wallet, now="2026-01-01T00:00:00+00:00", options=options)
    return folder


@pytest.fixture(scope="session")
def quick(small_genesis: Path) -> list[str]:
    """Flags of a node whose steps take milliseconds: the smallest model on the small Genesis folder."""
    return ["--genesis", str(small_genesis), "--memory", "500", "--cpu-threads", "1", "--inner-steps", "5"]


@pytest.fixture(scope="session")
def saving_often() -> Mapping[str, str]:
    """Environment of a node that saves every ten steps."""
    return SAVING_OFTEN


@pytest.fixture(scope="session")
def trained_folder(quick: list[str], saving_often: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data folder of a node that trained and was stopped well, with three checkpoints. Copy it, do not change it."""
    from benchmarks.node_process import running_node

    folder = tmp_path_factory.mktemp("trained") / "node"
    with running_node(folder, quick, variables=saving_often) as node:
        node.wait_for("three checkpoints", lambda status: len(status["checkpoints"]["generations"]) >= 3)
        assert node.stop() == 0
    return folder


@pytest.fixture
def trained(trained_folder: Path, tmp_path: Path) -> Path:
    """Data folder of a node that trained and was stopped well, for a test to change; it holds three checkpoints."""
    return shutil.copytree(trained_folder, tmp_path / "node")
