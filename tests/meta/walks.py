"""Walks: the functions and files that one step, one round and one hop enter, and the calls that climb the imports.

    python -m tests.meta.walks              the table of all walks with their goals
    python -m tests.meta.walks hop --names  one walk, its files and functions, and the edges that climb

The height of a module is one more than the height of the highest module of the package that it imports at module level.
An edge leads from the file of a call to the file that is called; it climbs if the called file is the higher one. A call
that passes through a library counts as a call by the nearest function of the package that is on the stack.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

if TYPE_CHECKING:
    from neuroshard.consensus.sync_strategies import RunRound
    from neuroshard.pipeline.executor import ComputeThread

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "neuroshard"


@dataclass(frozen=True, order=True)
class Size:
    """The size of a walk."""

    files: int
    functions: int
    climbing: int


@dataclass(frozen=True)
class Walk:
    """The places that a piece of running code entered, as names inside the repository."""

    functions: tuple[str, ...]
    files: tuple[str, ...]
    climbing: tuple[str, ...]

    @property
    def size(self) -> Size:
        return Size(len(self.files), len(self.functions), len(self.climbing))


class Recorder:
    """Records the package's calls between `start` and `stop`, in this thread and in those that start later."""

    def __init__(self) -> None:
        self._heights = module_heights()
        self._is_recording = False
        self._entered = set[CodeType]()
        self._edges = set[tuple[str, str]]()
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def start(self) -> None:
        self._is_recording = True

    def stop(self) -> None:
        self._is_recording = False

    def walk(self) -> Walk:
        """The calls recorded so far."""
        functions = {f"{_name(code.co_filename)}: {code.co_qualname}" for code in self._entered}
        files = {_name(code.co_filename) for code in self._entered}
        climbing = {
            f"{_name(caller)} -> {_name(called)}"
            for caller, called in self._edges
            if self._heights[called] > self._heights[caller]
        }
        return Walk(tuple(sorted(functions)), tuple(sorted(files)), tuple(sorted(climbing)))

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        called = frame.f_code
        if not self._is_recording or event != "call" or called.co_filename not in self._heights:
            return
        self._entered.add(called)
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename not in self._heights:
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != called.co_filename:
            self._edges.add((caller.f_code.co_filename, called.co_filename))


def module_heights() -> dict[str, int]:
    """Height of every module of the package, by the absolute path of its file."""
    modules = {module_name(path): path for path in PACKAGE.rglob("*.py")}

    @cache
    def height(module: str) -> int:
        return 1 + max(map(height, imports_of(modules[module], modules.keys()) - {module}), default=0)

    return {str(path): height(module) for module, path in modules.items()}


def module_name(path: Path) -> str:
    """Dotted name of a module of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Modules of the package that a file imports at module level. An import for type checking only is not one."""
    found = set[str]()
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                inner = f"{statement.module}.{alias.name}"
                found |= {inner if inner in modules else statement.module} & modules
        elif isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names} & modules
    return found


def _name(path: str) -> str:
    return Path(path).relative_to(ROOT).as_posix()


def one_lone_step() -> Walk:
    """Two inner steps of a trainer that holds the whole model and is alone, between two outer steps.

    It is two because the next step's batch is fetched while a step is computed.
    """
    recorder = Recorder()

    from neuroshard.data.windows import Batch
    from neuroshard.pipeline.executor import ComputeThread
    from tests.worlds.stages import MemoryFeed, make_stage, make_trainer

    class WatchedFeed(MemoryFeed):
        """Records from the first batch of the third step to the first batch of the fifth; a step takes two."""

        batches = 0

        async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
            self.batches += 1
            if self.batches == 5:
                recorder.start()
            elif self.batches == 9:
                recorder.stop()
            return await super().next_batch(sequences, step=step)

    compute = ComputeThread(cpu_threads=1)
    with TemporaryDirectory() as folder:
        stage = make_stage(compute, Path(folder))
        trainer = make_trainer(compute, stage, WatchedFeed(stage.record.progress.position))
        trio.run(trainer.run, 6)
    compute.close()
    return recorder.walk()


class Gate:
    """Opens when this number of tasks has come to it and every other task waits."""

    def __init__(self, tasks: int, opened: Callable[[], None]) -> None:
        self._missing = tasks
        self._opened = opened
        self.is_open = anyio.Event()

    async def pass_through(self) -> None:
        self._missing -= 1
        if not self._missing:
            await wait_all_tasks_blocked()
            self._opened()
            self.is_open.set()
        await self.is_open.wait()


def block_while_threads_work() -> None:
    """Let the event loop wait for every job of a worker thread. Modules that are imported later use this too."""
    helper = ThreadPoolExecutor(max_workers=1)

    async def run_sync(function: Callable[..., T], *arguments: object, **_options: object) -> T:
        await anyio.lowlevel.checkpoint()
        return helper.submit(function, *arguments).result()

    anyio.to_thread.run_sync = run_sync


class UnshuffledTasks(Random):
    """Leaves the tasks of the event loop in the order in which they were started."""

    def shuffle(self, x: MutableSequence[Any]) -> None:
        """Change nothing."""


def run_tasks_in_order() -> None:
    """Let all tasks that are ready at one moment run in a fixed order. Trio's is random, so messages would overtake."""
    schedule: Any = sys.modules["trio._core._run"]  # its plugin for Hypothesis sets the same two names
    schedule._ALLOW_DETERMINISTIC_SCHEDULING = True
    schedule._r = UnshuffledTasks(0)


def awaited_compute_thread() -> ComputeThread:
    """A compute thread for each of whose jobs the event loop waits."""
    from neuroshard.pipeline.executor import ComputeThread, Priority

    class AwaitedThread(ComputeThread):
        def submit(self, work: Callable[[], T], priority: Priority = Priority.TRAINING) -> Future[T]:
            result = super().submit(work, priority)
            wait([result])
            return result

    return AwaitedThread(cpu_threads=1)


LINK_SECONDS, BATCH_SECONDS = 0.05, 2.0  # virtual seconds that a message and a batch take; a round ends between batches
RECORDED_OUTER_STEP = 2  # the rounds before it also open connections and files


def one_certified_round() -> Walk:
    """A round of two trainers, from the moment both enter it until both have made the outer step and rest.

    The walk does not depend on chance or on the speed of the machine: time is virtual, tasks run in a fixed order, the
    event loop waits for the jobs of all threads, and both trainers enter the round only when nothing else is under way.
    """
    recorder = Recorder()
    block_while_threads_work()
    run_tasks_in_order()
    from neuroshard.network import InMemoryNetwork, Link
    from tests.worlds.trainers import NAMES, Node, node_of, trained_until

    begin, end = Gate(len(NAMES), recorder.start), Gate(len(NAMES), recorder.stop)

    def watch(node: Node) -> None:
        outer = node.trainer.parts.stages[0].outer
        run_round = outer.run_round

        async def run_watched(exchange: RunRound, now: float) -> bool:
            if outer.state.outer_step != RECORDED_OUTER_STEP:
                return await run_round(exchange, now)
            await begin.pass_through()
            completed = await run_round(exchange, now)
            await end.pass_through()
            return completed

        outer.run_round = run_watched  # type: ignore[method-assign]

    computes = [awaited_compute_thread() for _ in NAMES]

    async def train(folder: Path) -> None:
        with InMemoryNetwork(default_link=Link(LINK_SECONDS)) as network:
            nodes = [
                node_of(compute, folder, name, network, shard, batch_seconds=BATCH_SECONDS)
                for shard, (compute, name) in enumerate(zip(computes, NAMES, strict=True))
            ]
            for node in nodes:
                watch(node)
            await trained_until(end.is_open.is_set, nodes)

    with TemporaryDirectory() as folder:
        trio.run(train, Path(folder), clock=MockClock(autojump_threshold=0))
    for compute in computes:
        compute.close()
    return recorder.walk()


def one_remote_hop() -> Walk:
    """The forward of the second microbatch through a stage on another node. The first one opens the session."""
    recorder = Recorder()

    from neuroshard.network import InMemoryNetwork
    from neuroshard.pipeline.executor import ComputeThread
    from neuroshard.pipeline.stage_client import RemoteStageClient
    from neuroshard.pipeline.stage_protocol import StageAddress
    from neuroshard.pipeline.stage_requests import StageRequestHandler
    from neuroshard.pipeline.tensor_checks import StageShapes
    from neuroshard.types import LayerRange, NodeId, RunId
    from tests.worlds.stages import ARCHITECTURE, activations, key, service_of

    compute = ComputeThread(cpu_threads=1)
    stage, peer = StageAddress(RunId("1" * 64), LayerRange(1, 2), 1), NodeId("peer")
    shapes = StageShapes.for_layers(ARCHITECTURE, stage.layers, 4)

    async def call() -> None:
        with InMemoryNetwork() as network:
            StageRequestHandler(service_of(compute, 1, 2), stage, shapes).serve(network.join(peer))
            client = RemoteStageClient(network.join(NodeId("driver")), peer, stage, shapes)
            await client.forward(key(0), activations())
            recorder.start()
            await client.forward(key(1), activations())
            compute.submit(int).result()  # until the thread has ended the job and looked for the next one
            recorder.stop()

    trio.run(call)
    compute.close()
    return recorder.walk()


@dataclass(frozen=True)
class Budget:
    """A walk, the most it may cross today, and its goal. Today's numbers only go down."""

    record: Callable[[], Walk]
    today: Size
    goal: Size


BUDGETS = {
    "step": Budget(one_lone_step, Size(files=23, functions=152, climbing=0), goal=Size(22, 130, 0)),
    "hop": Budget(one_remote_hop, Size(files=16, functions=132, climbing=4), goal=Size(14, 100, 0)),
    "round": Budget(one_certified_round, Size(files=54, functions=558, climbing=11), goal=Size(55, 480, 0)),
}


def recorded(name: str) -> Walk:
    """A walk in a process of its own: nothing is cached yet, and every thread starts under the recorder.

    Raises CalledProcessError if the process fails.
    """
    command = [sys.executable, "-m", "tests.meta.walks", name, "--json"]
    environment = os.environ | {"PYTHONHASHSEED": "0"}  # sets have the same order each time
    output = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, timeout=240).stdout
    return Walk(**{field: tuple(names) for field, names in json.loads(output).items()})


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the sizes of walks, or one walk as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.meta.walks", description="Counts the walks and their goals.")
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"{', '.join(BUDGETS)}; all by default")
    parser.add_argument("--names", action="store_true", help="print the files, functions and climbing edges as well")
    parser.add_argument("--json", action="store_true", help="run one walk in this process and print it as JSON")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.walks if name not in BUDGETS]
    if unknown:
        parser.error(f"{unknown[0]} is not a walk. Use {', '.join(BUDGETS)}.")
    say = partial(print, flush=True)
    if options.json:
        (name,) = options.walks
        say(json.dumps(asdict(BUDGETS[name].record())))
        return
    say(f"{'walk':8}{'files':>14}{'functions':>14}{'climbing':>14}   (counted / goal)")
    for name in options.walks or BUDGETS:
        walk, goal = recorded(name), BUDGETS[name].goal
        counts = zip(asdict(walk.size).values(), asdict(goal).values(), strict=True)
        say(f"{name:8}" + "".join(f"{f'{count} / {most}':>14}" for count, most in counts))
        if options.names:
            for title, names in asdict(walk).items():
                say(f"\n{title}:\n  " + "\n  ".join(names))


if __name__ == "__main__":
    main()
