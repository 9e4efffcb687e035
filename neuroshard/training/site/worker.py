"""Rank 1 or up of a site: a process that computes what rank 0 commands, and has no keys, token, API or data folder.

`python -m neuroshard.training.site.worker` reads a `RankStart` from its standard input, and ends when this input ends,
so that it does not survive rank 0.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from math import nan
from pathlib import Path
from threading import Thread
from typing import Literal, cast

import torch
from torch import Tensor

from neuroshard import __version__
from neuroshard.decoders import json_decoder
from neuroshard.errors import NeuroShardError
from neuroshard.identity.run_parameters import run_parameters_from_json
from neuroshard.model.subspace import subspace_of
from neuroshard.model.transformer import StageModel
from neuroshard.optim.inner_optimizer import clipped_step, make_inner_optimizer
from neuroshard.pipeline.compilation import Compilation, compilation_of
from neuroshard.pipeline.executor import OpenMicrobatch, PassResult, Precision, StageExecutor
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.state.system_resources import yield_to_other_programs
from neuroshard.training.site.commands import (
    AddGradients,
    ApplyGradients,
    BuildStage,
    Command,
    Done,
    EndSite,
    ForgetStages,
    Movement,
    MoveTensors,
    PassKind,
    RankFacts,
    ReadRows,
    RunPass,
    TakeWeights,
    WriteRows,
    decode_apply,
    decode_command,
    to_message,
)
from neuroshard.training.site.plan import SitePlan
from neuroshard.training.site.process_group import LostRankError, ProcessGroup, form_of, meet
from neuroshard.training.site.rank_processes import REASON, RankStart
from neuroshard.training.site.shard_executor import ShardExecutor
from neuroshard.training.site.stage_sums import add_gradients, gradient_mask, held_tensors
from neuroshard.types import LayerRange

LARGEST_BATCH = 1 << 20  # rank 0 has checked the shapes of its microbatches
MEETING_SECONDS = 120.0


class Rank:
    """Stages of one rank, which follow rank 0 command by command."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._stages = dict[int, StageExecutor]()
        self._opened = dict[int, OpenMicrobatch]()
        self._compilation: Compilation | None = None

    def run(self) -> None:
        """Follow commands until the site ends. Raises LostRankError with the rank that has failed: this or another."""
        try:
            while not isinstance(command := decode_command(self._group.next_command()), EndSite):
                self._follow(command)
        except Exception as error:
            raise self._group.lost(error) from error
        self._group.close()

    def _follow(self, command: Command) -> None:
        match command:
            case BuildStage():
                self._build(command)
            case TakeWeights():
                self._group.share(held_tensors(self._stages[command.stage], with_moments=command.with_moments))
            case ReadRows():
                self._send_rows(self._shard(command.stage), command)
                return
            case WriteRows():
                self._take_rows(self._shard(command.stage), command)
            case RunPass():
                self._pass(command)
                return
            case AddGradients():
                self._add_gradients(self._stages[command.stage])
                return
            case MoveTensors():
                self._move(command, self._stages[command.stage])
            case ForgetStages():
                for stage in command.stages:
                    self._stages.pop(stage, None)
            case EndSite():
                return
        self._group.send(to_message(Done(self._group.number)), 0)

    def _build(self, command: BuildStage) -> None:
        parameters = run_parameters_from_json(json_decoder(object).decode(command.parameters))
        if command.is_sharded:
            layers = LayerRange(*command.layers)
            self._stages[command.stage] = ShardExecutor(parameters, layers, self._device, self._group)
            return
        model = StageModel(parameters.architecture, LayerRange(*command.layers), subspace_of(parameters))
        model.to(self._device)
        wanted = cast("Literal['auto', 'off']", command.compile)
        self._compilation = self._compilation or compilation_of(wanted, self._device)
        optimizer = make_inner_optimizer(model, parameters.inner)
        self._stages[command.stage] = StageExecutor(model, optimizer, self._device, compilation=self._compilation)

    def _shard(self, stage: int) -> ShardExecutor:
        executor = self._stages[stage]
        if not isinstance(executor, ShardExecutor):
            raise TypeError(f"stage {stage} is not divided among the ranks")
        return executor

    def _send_rows(self, executor: ShardExecutor, command: ReadRows) -> None:
        for name in command.names:
            if (part := executor.part(name)).numel():
                self._group.send_tensors([part], 0)

    def _take_rows(self, executor: ShardExecutor, command: WriteRows) -> None:
        for name in command.names:
            if (part := executor.part(name)).numel():
                (rows,) = self._group.receive_tensors([form_of(part)], 0)
                part.copy_(required(rows))

    def _pass(self, command: RunPass) -> None:
        """Run this rank's part of a wave and send the result. Without a microbatch there is none to send."""
        for microbatch in command.forgotten:
            self._opened.pop(microbatch, None)
        microbatch = command.microbatches[self._group.rank]
        executor = self._stages[command.stage]
        executor.precision = Precision(command.precision)
        if microbatch == 0:
            if isinstance(executor, ShardExecutor):
                executor.idle(command.operation)
            return
        tensors = self._group.receive_tensors(command.tensors, 0)
        result = self._computed(executor, command, microbatch, tensors)
        if result.opened is not None:
            self._opened[microbatch] = result.opened
        loss = nan if result.loss_sum is None else result.loss_sum.item()
        sent = (result.output, result.gradient)
        values = (result.seconds, float(result.is_spoilt), loss)
        self._group.send(to_message(Done(self._group.number, values, tensors=tuple(map(form_of, sent)))), 0)
        self._group.send_tensors(sent, 0)

    def _computed(
        self, executor: StageExecutor, command: RunPass, microbatch: int, tensors: Sequence[Tensor | None]
    ) -> PassResult:
        first = required(tensors[0])
        shapes = StageShapes.of(executor.model, LARGEST_BATCH)
        match command.operation:
            case PassKind.FORWARD:
                return executor.forward_pass(shapes, first, keeps_graph=command.keeps_graph, ids=tensors[2])
            case PassKind.LOSS:
                return executor.loss_pass(shapes, first, required(tensors[1]), tensors[2])
            case PassKind.BACKWARD:
                return executor.backward_pass(self._opened.pop(microbatch), first)

    def _add_gradients(self, executor: StageExecutor) -> None:
        """Add the gradients of all ranks and make the step of rank 0."""
        self._group.send(to_message(Done(self._group.number, present=gradient_mask(executor.model))), 0)
        mask = self._group.send_all(b"")
        if isinstance(executor, ShardExecutor):
            executor.add_squares()
        else:
            add_gradients(self._group, executor.model, mask)
        applied = decode_apply(self._group.send_all(b""))
        if applied.is_step:
            self._step(executor, applied)
        executor.zero()

    @staticmethod
    def _step(executor: StageExecutor, applied: ApplyGradients) -> None:
        clipped_step(
            executor.optimizer,
            applied.learning_rate,
            tokens=applied.tokens,
            grad_norm=applied.grad_norm,
            max_norm=applied.max_norm,
        )
        if executor.compilation.is_waiting:
            executor.compilation.begin(executor.model.first_block)

    def _move(self, command: MoveTensors, executor: StageExecutor) -> None:
        match command.movement:
            case Movement.SUSPEND:
                executor.suspend()
            case Movement.RESUME:
                executor.resume()
            case Movement.DROP:
                executor.drop_tensors()
            case Movement.ALLOCATE:
                executor.allocate_tensors()
            case Movement.ZERO:
                executor.zero()
            case Movement.ASIDE:
                self._shard(command.stage).set_aside()
            case Movement.BACK:
                self._shard(command.stage).take_back()


def required(tensor: Tensor | None) -> Tensor:
    """A tensor that a command requires. Raises ValueError without it."""
    if tensor is None:
        raise ValueError("the command has no tensor")
    return tensor


def rank_facts(width: int, device: str) -> RankFacts:
    """Facts of this process."""
    return RankFacts(__version__, str(torch.__version__), width, device)


def device_of(kind: str, local_rank: int) -> torch.device:
    """Device of a rank, which becomes the current one of this thread."""
    if kind == "cpu":
        return torch.device("cpu")
    index = local_rank if torch.accelerator.device_count() > 1 else 0  # SLURM may show each task its own GPU only
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def follow_rank_0(
    plan: SitePlan, facts: RankFacts, folder: Path | None, *, threads: int, timeout_seconds: float
) -> None:
    """Meet the other ranks and follow rank 0 until it ends. Raises UsageError and LostRankError."""
    yield_to_other_programs()
    torch.set_num_threads(threads)
    device = device_of(facts.device, plan.local_rank)
    store = meet(plan, facts, folder, MEETING_SECONDS, lambda: None)
    Rank(ProcessGroup(plan, facts, store, timeout_seconds), device).run()


def _first_line(leash: int) -> bytes:
    """Read a line without a buffer, whose lock a waiting thread would keep at the end of the process."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(leash, 1)):
            break
        line += byte
    return line


def _end_with(leash: int) -> None:
    """End this process at once when rank 0 has closed or lost the other end of `leash`."""
    while os.read(leash, 64):
        pass
    os._exit(0)


def main() -> int:
    """Run a rank that rank 0 has started. Returns the exit code; the last line of its output is the reason."""
    leash = sys.stdin.fileno()
    start = cast("RankStart", json_decoder(RankStart).decode(_first_line(leash)))
    Thread(target=_end_with, args=(leash,), daemon=True).start()
    plan = SitePlan(start.width, start.rank, start.rank)
    try:
        follow_rank_0(
            plan,
            rank_facts(start.width, start.device),
            Path(start.folder),
            threads=start.threads,
            timeout_seconds=start.timeout_seconds,
        )
    except LostRankError as error:
        if error.rank == start.rank:
            traceback.print_exception(error)
        else:
            time.sleep(1.0)  # if rank 0 has ended, so does the input of this process, and then it ends in silence
        return _ended_by(str(error))
    except NeuroShardError as error:
        return _ended_by(error.message.rstrip("."))
    except torch.OutOfMemoryError:
        return _ended_by("out of memory")
    return 0


def _ended_by(reason: str) -> int:
    sys.stdout.write(f"{REASON}{reason}\n")
    sys.stdout.flush()
    return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of the process group may still wait for ranks that have ended
