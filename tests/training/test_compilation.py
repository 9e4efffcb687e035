"""Compilation by torch.compile's backends "eager" and "aot_eager" on the CPU. They say nothing about speed."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from neuroshard.config.settings import Settings
from neuroshard.model.transformer import Block, StageModel
from neuroshard.model.weights import initialise
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.pipeline.compilation import (
    Backend,
    Compilation,
    compilation_of,
    reason_of,
)
from neuroshard.pipeline.executor import ComputeThread, Precision, StageExecutor
from neuroshard.status.computer import CompilationState, CompilationStatus
from neuroshard.types import Architecture
from tests.worlds.stages import ARCHITECTURE, PARAMETERS, executor_of, windows

COMPILER = "neuroshard-compiler"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """PyTorch keeps compiled code by function, and the stance for the process."""
    import torch._dynamo

    def reset() -> None:
        torch.compiler.set_stance("default")
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    reset()
    yield
    reset()


class Seconds:
    """A clock on which an eager pass takes a second, and a compiled one this number."""

    def __init__(self, compiled: float = 0.5) -> None:
        self._ticks = 0
        self._now = 0.0
        self._compiled = compiled

    def __call__(self) -> float:
        self._ticks += 1
        if self._ticks % 2 == 0:  # the end of a pass; the two forms take turns, the compiled one first
            self._now += self._compiled if self._ticks % 4 == 2 else 1.0
        return self._now


def wanted(backend: Backend = "aot_eager", compiled_seconds: float = 0.5, failures: list[str] | None = None) -> Any:
    """A compilation on the CPU that leaves the other tests of this process alone."""
    own = [] if failures is None else failures
    return Compilation(is_wanted=True, backend=backend, clock=Seconds(compiled_seconds), failures=own)


def whole(compilation: Compilation | None = None, architecture: Architecture = ARCHITECTURE) -> StageExecutor:
    model = StageModel(architecture)
    initialise(model, 7)
    optimizer = make_inner_optimizer(model, PARAMETERS.inner)
    return StageExecutor(model, optimizer, torch.device("cpu"), compilation=compilation)


def train(executor: StageExecutor, steps: int = 1, first: int = 0) -> list[float]:
    """Steps of one microbatch each; returns their losses."""
    losses = list[float]()
    for step in range(first, first + steps):
        batch = windows(step, 2)
        executor.loss(batch[:, :-1], batch[:, 1:])
        losses.append(executor.step(1e-3, 1.0, batch[:, 1:].numel()).loss or 0.0)
    return losses


def finished(compilation: Compilation) -> CompilationStatus:
    """The status after the compiler's thread has ended."""
    for thread in threading.enumerate():
        if thread.name == COMPILER:
            thread.join(120)
    return compilation.status


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("neuroshard")]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_compiled_form_takes_over_and_trains_alike(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plain, executor = whole(), whole(wanted(backend))
    assert executor.compilation.status.state is CompilationState.WAITING
    assert train(executor) == train(plain)
    assert finished(executor.compilation) == CompilationStatus(CompilationState.USED)
    assert lines(caplog) == ["Blocks are compiled from now on: 2.00 times as fast as before."]
    assert train(executor, 5, 1) == pytest.approx(train(plain, 5, 1), rel=1e-6)
    assert executor.compilation.status.state is CompilationState.USED
    for one, other in zip(executor.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_one_graph_serves_all_blocks_of_all_stages() -> None:
    """The graphs that the backend got, and those that really ran."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    made, ran = list[str](), list[str]()

    def counted(name: str) -> Callable[[Any, Any], Any]:
        def compiler(graph: Any, _inputs: Any) -> Any:
            made.append(f"{name} on {threading.current_thread().name}")

            def run(*arguments: Any) -> Any:
                ran.append(name)
                return graph(*arguments)

            return make_boxed_func(run)

        return compiler

    compilation = wanted(aot_autograd(fw_compiler=counted("forward"), bw_compiler=counted("backward")))
    deep = replace(ARCHITECTURE, layer_count=12)  # more blocks than the graphs that PyTorch would make of a function
    first, second = whole(compilation, deep), whole(compilation, deep)
    train(first)
    assert finished(compilation).state is CompilationState.USED
    ran.clear()
    train(first, 2, 1)
    train(second, 1)
    assert sorted(ran) == ["backward"] * 36 + ["forward"] * 36
    assert sorted(made) == [f"backward on {COMPILER}", f"forward on {COMPILER}"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_both_passes_are_compiled_before_the_first_backward_pass() -> None:
    """The backward passes of a GPU share one thread, which must not compile."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    order = list[str]()

    def backward(graph: Any, _inputs: Any) -> Any:
        order.append("made backward")
        return make_boxed_func(graph)

    def forward(graph: Any, _inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            order.append("ran forward")
            return graph(*arguments)

        return make_boxed_func(run)

    compilation = wanted(aot_autograd(fw_compiler=forward, bw_compiler=backward))
    train(whole(compilation))
    assert finished(compilation).state is CompilationState.USED
    assert order[:2] == ["made backward", "ran forward"]


def test_training_does_not_wait_while_the_compiler_works(compute: ComputeThread) -> None:
    """The compiler is held up: steps of the compute thread end all the same, and the swap comes between two of them."""
    begun, release = Event(), Event()

    def held_up(graph: Any, _inputs: Any) -> Any:
        begun.set()
        assert release.wait(120)
        return graph

    executor = whole(wanted(held_up))
    compute.submit(lambda: train(executor)).result(60)
    assert begun.wait(60)
    assert executor.compilation.status.state is CompilationState.COMPILING
    compute.submit(lambda: train(executor, 3, 1)).result(60)
    assert executor.compilation.status.state is CompilationState.COMPILING
    release.set()
    assert finished(executor.compilation).state is CompilationState.USED
    compute.submit(lambda: train(executor, 1, 4)).result(60)
    assert executor.compilation.status.state is CompilationState.USED  # with the thread's own number of CPU threads


def wrong_backend(graph: Any, _inputs: Any) -> Any:
    return lambda *arguments: tuple(part * 1.001 for part in graph(*arguments))


def nan_backend(graph: Any, _inputs: Any) -> Any:
    return lambda *arguments: tuple(part * float("nan") for part in graph(*arguments))


def broken_backend(_graph: Any, _inputs: Any) -> Any:
    raise FileNotFoundError("no compiler in the path\nand more lines")


@pytest.mark.parametrize(
    ("backend", "seconds", "reason"),
    [
        (wrong_backend, 0.5, "the compiled form is wrong"),
        (nan_backend, 0.5, "the compiled form is wrong: it differs by nan"),
        (broken_backend, 0.5, "FileNotFoundError: no compiler in the path"),
        ("no such backend", 0.5, "InvalidBackend"),
        ("aot_eager", 0.96, "the compiled form is 1.04 times as fast"),
        ("aot_eager", 2.0, "the compiled form is 0.50 times as fast"),
    ],
    ids=["wrong", "not a number", "broken", "unknown", "hardly faster", "slower"],
)
def test_training_stays_eager_with_one_line_and_without_a_second_try(
    backend: Backend, seconds: float, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    failures = list[str]()
    plain, executor = whole(), whole(wanted(backend, seconds, failures))
    train(executor)
    status = finished(executor.compilation)
    assert status.state is CompilationState.REFUSED
    assert status.reason.startswith(reason)
    assert lines(caplog) == [f"Training computes without compilation: {status.reason}."]
    train(plain)
    assert train(executor, 2, 1) == train(plain, 2, 1)  # eager, bit for bit

    again = whole(wanted("aot_eager", 0.5, failures))
    train(again)
    assert finished(again.compilation) == status
    assert len(lines(caplog)) == 1


def test_wrong_gradients_are_found_as_well() -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def plain(graph: Any, _inputs: Any) -> Any:
        return make_boxed_func(graph)

    def doubled(graph: Any, _inputs: Any) -> Any:
        return make_boxed_func(
            lambda *arguments: tuple(part if part is None else part * 2 for part in graph(*arguments))
        )

    executor = whole(wanted(aot_autograd(fw_compiler=plain, bw_compiler=doubled)))
    train(executor)
    assert finished(executor.compilation).reason.startswith("the compiled form is wrong")


def test_a_form_that_fails_later_is_given_up_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """The step in which it fails computes the same as an eager one."""
    fails = Event()

    def fragile(graph: Any, _inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            if fails.is_set():
                raise RuntimeError("a kernel cannot be loaded")
            return graph(*arguments)

        return run

    plain, executor = whole(), whole(wanted(fragile))
    train(executor)
    assert finished(executor.compilation).state is CompilationState.USED
    train(plain)
    fails.set()
    assert train(executor, 2, 1) == train(plain, 2, 1)
    assert executor.compilation.status.reason == "RuntimeError: a kernel cannot be loaded"
    assert len(lines(caplog)) == 1


def test_a_form_that_would_have_to_be_compiled_again_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    executor = whole(wanted())
    train(executor)
    assert finished(executor.compilation).state is CompilationState.USED
    executor.precision = Precision.BF16  # compiled code is valid for one precision
    losses = train(executor, 2, 1)
    assert all(0 < loss < 10 for loss in losses)
    assert executor.compilation.status.state is CompilationState.REFUSED
    assert "recompile" in executor.compilation.status.reason
    assert len(lines(caplog)) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_only_the_plain_training_pass_is_compiled() -> None:
    """Text, evaluation, passes that are computed again, and batches of another size keep the eager form's bits."""
    ran = list[int]()

    def counted(graph: Any, _inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            ran.append(1)
            return graph(*arguments)

        return run

    compiled = StageExecutor(*model_and_optimizer(1, 3), torch.device("cpu"), compilation=wanted(counted))
    plain = executor_of(1, 3)
    inputs, labels = torch.randn(2, 16, 32), windows(0, 2)[:, 1:]
    for executor in (compiled, plain):
        executor.loss(inputs, labels)
        executor.step(1e-3, 1.0, labels.numel())
    assert finished(compiled.compilation).state is CompilationState.USED
    ran.clear()
    for results in zip(*(eager_results(executor, inputs, labels) for executor in (compiled, plain)), strict=True):
        assert torch.equal(*results)
    assert ran == []
    compiled.loss(inputs, labels)
    assert len(ran) == 2
    assert compiled.compilation.status.state is CompilationState.USED


def model_and_optimizer(start: int, stop: int) -> tuple[StageModel, Any]:
    made = executor_of(start, stop)
    return made.model, made.optimizer


def eager_results(executor: StageExecutor, inputs: Tensor, labels: Tensor) -> Iterator[Tensor]:
    cache = executor.empty_cache()
    yield executor.read(inputs[:1, :4], cache)
    yield executor.read(inputs[:1, 4:5], cache)
    yield executor.infer(inputs, labels)
    opened = executor.forward(inputs, keeps_graph=False)
    yield opened.output
    gradient = executor.backward(opened, torch.ones_like(opened.output))
    assert gradient is not None
    yield gradient
    executor.zero()
    yield executor.loss(inputs[:1], labels[:1])[0]
    executor.zero()


def test_a_stage_in_the_middle_is_compiled_for_its_forward_pass() -> None:
    compiled = StageExecutor(*model_and_optimizer(1, 2), torch.device("cpu"), compilation=wanted())
    plain = executor_of(1, 2)
    inputs, gradient = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    for _ in range(2):
        results = list[Tensor | None]()
        for executor in (compiled, plain):
            opened = executor.forward(inputs)
            results += [opened.output, executor.backward(opened, gradient)]
            executor.step(1e-3, 1.0, 32)
        torch.testing.assert_close(results[:2], results[2:])
        assert finished(compiled.compilation).state is CompilationState.USED


def test_a_model_on_another_device_is_run_eagerly_until_it_is_back() -> None:
    executor = whole(wanted())
    train(executor)
    assert finished(executor.compilation).state is CompilationState.USED
    run_block, block = executor.compilation.run_block, Block(ARCHITECTURE, 0)
    shapes = (2, 16, 32), (16, 8), (16, 8)
    inputs = [torch.ones(shape, device="meta") for shape in shapes]
    assert run_block(block.to("meta"), *inputs, None).device.type == "meta"
    executor.suspend()
    executor.resume()
    train(executor, 1, 1)
    assert executor.compilation.status.state is CompilationState.USED


def test_gradients_that_are_averaged_begin_it_too() -> None:
    executor = whole(wanted())
    batch = windows(0, 2)
    executor.loss(batch[:, :-1], batch[:, 1:])
    executor.take_gradient(32)
    assert finished(executor.compilation).state is CompilationState.USED


def test_the_compiler_leaves_weights_gradients_and_chance_alone() -> None:
    executor = whole(wanted())
    train(executor)
    before = [parameter.detach().clone() for parameter in executor.model.parameters()]
    random_state = torch.random.get_rng_state()
    assert finished(executor.compilation).state is CompilationState.USED
    assert all(torch.equal(one, other) for one, other in zip(before, executor.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in executor.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_training_in_bf16_is_compared_with_the_tolerance_of_bf16() -> None:
    """A thousandth is an error in fp32, see above, and rounding in bf16."""
    executor = whole(wanted(wrong_backend))
    executor.precision = Precision.BF16
    train(executor)
    assert finished(executor.compilation).state is CompilationState.USED


def test_a_model_with_a_subspace_stays_eager() -> None:
    architecture = replace(ARCHITECTURE, subspace_rank=8)
    made = executor_of(0, 3, architecture)
    executor = StageExecutor(made.model, made.optimizer, torch.device("cpu"), compilation=wanted())
    train(executor, 2)
    assert executor.compilation.status.state is CompilationState.OFF
    assert "subspace" in executor.compilation.status.reason


def test_the_frozen_program_does_not_try(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    executor = whole(wanted())
    train(executor)
    assert executor.compilation.status == CompilationStatus(CompilationState.REFUSED, "this package has no compiler")
    assert len(lines(caplog)) == 1


def test_without_memory_for_the_copy_training_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_self: Any, _memo: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    executor = whole(wanted())
    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", full)
    train(executor, 2)
    assert executor.compilation.status == CompilationStatus(CompilationState.REFUSED, "OutOfMemoryError: no memory")
    assert len(lines(caplog)) == 1


def test_a_full_accelerator_is_not_blamed_on_the_form() -> None:
    """The caller frees memory and runs the pass again."""
    full = Event()

    def hungry(graph: Any, _inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            if full.is_set():
                raise torch.OutOfMemoryError("no memory")
            return graph(*arguments)

        return run

    executor = whole(wanted(hungry))
    train(executor)
    assert finished(executor.compilation).state is CompilationState.USED
    full.set()
    with pytest.raises(torch.OutOfMemoryError):
        train(executor, 1, 1)
    full.clear()
    executor.zero()
    train(executor, 1, 1)
    assert executor.compilation.status.state is CompilationState.USED


def test_auto_acts_on_cuda_and_xpu_only() -> None:
    assert Settings().compile == "auto"
    states = {
        (setting, kind): compilation_of(setting, torch.device(kind)).status.state
        for setting in ("auto", "off")
        for kind in ("cpu", "mps", "cuda", "xpu")
    }
    waiting = {case for case, state in states.items() if state is CompilationState.WAITING}
    assert waiting == {("auto", "cuda"), ("auto", "xpu")}
    assert set(states.values()) == {CompilationState.WAITING, CompilationState.OFF}
    executor = whole(compilation_of("auto", torch.device("cpu")))
    train(executor, 2)
    assert executor.compilation.run_block == Block.__call__
    assert executor.compilation.status.reason == "nothing is compiled for the device cpu"


def test_a_reason_is_one_bounded_line_of_the_first_cause() -> None:
    cause = ValueError("the first line.\nthe second")
    outer = RuntimeError("backend raised:\n...")
    outer.inner_exception = cause  # type: ignore[attr-defined]
    assert reason_of(outer) == "ValueError: the first line"
    assert reason_of(KeyError()) == "KeyError"
    assert len(reason_of(ValueError("x" * 1_000))) == 300
