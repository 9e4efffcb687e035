"""Handlers for the requests of peers, which enter the same stage server as this node's own requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from neuroshard.data.held_out_losses import LossSigner
from neuroshard.messages import Frame
from neuroshard.network import ScoreReason, Transport
from neuroshard.pipeline.chain_protocol import HAND, PASS, HandedTensor, PassQuestion
from neuroshard.pipeline.chain_server import ChainRequestHandler, Neighbours, refused, serve_chain
from neuroshard.pipeline.microbatch import (
    MicrobatchKey,
    RefusedTensorError,
    StageBusyError,
    StageError,
    StageGoneError,
)
from neuroshard.pipeline.stage_protocol import (
    Operation,
    StageAddress,
    StageAnswer,
    StageRequest,
    answer_frame,
    is_for_layers,
    read_request,
    recompute_seconds,
    refusal_frame,
    request_limits,
    run_off_loop,
)
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.tensor_checks import StageShapes, checked_loss
from neuroshard.types import LayerRange, NodeId

MAX_CONCURRENT = 16


class StageRequestHandler:
    """Answers the requests of drivers to one stage. The transport has verified the sender, who owns its sessions."""

    def __init__(
        self,
        service: StageServer,
        stage: StageAddress,
        shapes: StageShapes,
        *,
        root: Callable[[], str] = lambda: "",
        may_drive: Callable[[NodeId], bool] = lambda _: True,
        report: Callable[[NodeId, ScoreReason], None] = lambda _peer, _reason: None,
        sign: LossSigner = lambda _labels, _summed: b"",
        neighbours: Neighbours | None = None,
    ) -> None:
        """`root` returns the stage's present state root; `report` gets misbehaviour of peers; `sign` signs losses.

        `neighbours` is the way to the stages before and after this one; None: this stage is in no chain.
        """
        self.chain = (
            None
            if neighbours is None
            else ChainRequestHandler(service, stage, shapes, neighbours, root=root, may_drive=may_drive, report=report)
        )
        self._service = service
        self._stage = stage
        self._shapes = shapes
        self._root = root
        self._may_drive = may_drive
        self._report = report
        self._sign = sign

    @property
    def layers(self) -> LayerRange:
        """Layers of this stage."""
        return self._stage.layers

    def keep_only(self, nodes: Container[NodeId]) -> None:
        """Forget the texts and sessions of all nodes that are not in `nodes`."""
        self._service.keep_only(nodes)
        if self.chain is not None:
            self.chain.keep_only(nodes)

    def serve(self, transport: Transport) -> None:
        """Register the request handlers. Raises ValueError if the transport already has those of a stage."""
        for operation in Operation:
            limits = request_limits(operation, self._shapes)
            transport.serve(operation.value, self.answer, limits, max_concurrent=MAX_CONCURRENT)
        if self.chain is not None:
            self.chain.serve(transport)

    async def answer(self, sender: NodeId, frame: Frame) -> Frame:
        """Answer one request. Every StageError becomes a refusal frame."""
        began = time.perf_counter()
        # The sender may be a member of which this node has not heard yet, so it may try again.
        if not self._may_drive(sender):
            return refusal_frame(StageBusyError("This node works for members of its run only."))
        try:
            request = await run_off_loop(
                lambda: read_request(frame, self._stage, self._shapes.hidden_size), *frame.tensors
            )
            key = MicrobatchKey(sender, request.session, request.microbatch)
            before, _ = self._service.computed(key)
            found = await self._carry_out(key, request)
        except RefusedTensorError as error:
            self._report(sender, ScoreReason.UNEXPECTED_TENSOR)
            return refusal_frame(error)
        except StageError as error:
            return refusal_frame(error)
        after, is_recomputed = self._service.computed(key)
        worked = max(0.0, after - before)
        again = recompute_seconds(request.operation, before, worked) if is_recomputed else 0.0
        answer = replace(
            found,
            root=self._root(),
            compute_seconds=worked,
            recompute_seconds=again,
            seconds=time.perf_counter() - began,
            claim=self._claim(request.labels, found.losses),
        )
        return await run_off_loop(lambda: answer_frame(request, answer), answer.output, answer.gradient)

    def _claim(self, labels: Tensor | None, losses: Tensor | None) -> bytes:
        """Sign finite losses; no bytes without them."""
        if labels is None or losses is None or not bool(torch.isfinite(losses).all()):
            return b""
        return self._sign(labels, losses)

    async def _carry_out(self, key: MicrobatchKey, request: StageRequest) -> StageAnswer:
        """Do the requested work. The answer has no times yet."""
        service = self._service
        match request.operation:
            case Operation.FORWARD:
                return StageAnswer(output=await service.forward(key, _given(request.inputs), request.ids))
            case Operation.LOSS:
                labels = _given(request.labels)
                loss_sum, gradient = await service.loss(key, _given(request.inputs), labels, request.ids)
                return StageAnswer(gradient=gradient, loss_sum=checked_loss(loss_sum, labels))
            case Operation.BACKWARD:
                return StageAnswer(gradient=await service.backward(key, _given(request.gradient)))
            case Operation.INFER:
                result = await service.infer(_given(request.inputs), request.labels, request.ids)
                return StageAnswer(output=result) if request.labels is None else StageAnswer(losses=result)
            case Operation.READ:
                place = key.driver, key.session, key.microbatch
                result = await service.read(*place, _given(request.inputs), request.ids)
                return StageAnswer(logits=result) if self._shapes.is_last else StageAnswer(output=result)
            case Operation.CLOSE | Operation.FORGET:
                forget = service.close if request.operation is Operation.CLOSE else service.texts.forget
                forget(key.driver, key.session)
                if self.chain is not None and request.operation is Operation.CLOSE:
                    self.chain.close(key.driver, key.session)
                return StageAnswer()
            case _:
                assert_never(request.operation)


_NOT_HELD = StageGoneError("This node does not hold these layers now.")


class StageRequestHandlers:
    """Handlers of all stages that a node holds. A request reaches its stage by the layers that it names."""

    def __init__(self, shapes: Iterable[StageShapes]) -> None:
        """`shapes` contains every stage of the run, because this node may come to hold any of them."""
        self._shapes = tuple(shapes)
        self._held: dict[LayerRange, StageRequestHandler] = {}

    def add(self, endpoint: StageRequestHandler) -> None:
        """Accept requests to this stage."""
        self._held[endpoint.layers] = endpoint

    def keep_only(self, nodes: Container[NodeId]) -> None:
        """Forget the texts and sessions of all nodes that are not in `nodes`, in every stage."""
        for endpoint in self._held.values():
            endpoint.keep_only(nodes)

    def clear(self) -> None:
        """Stop accepting requests. Drivers go to other replicas."""
        self._held.clear()

    def serve(self, transport: Transport) -> None:
        """Register the request handlers. Raises ValueError if the transport already has those of a stage."""
        for operation in Operation:
            every = [request_limits(operation, shapes) for shapes in self._shapes]
            limits = max(every, key=lambda one: one.max_body_bytes)
            transport.serve(operation.value, self.answer, limits, max_concurrent=MAX_CONCURRENT)
        serve_chain(transport, self._shapes, self._answer_pass, self.take)

    async def answer(self, sender: NodeId, frame: Frame) -> Frame:
        """Answer one request with the stage that it names; refuse it if this node does not hold that stage."""
        endpoint = next((one for one in self._held.values() if is_for_layers(frame, one.layers)), None)
        if endpoint is None:
            return refusal_frame(_NOT_HELD)
        return await endpoint.answer(sender, frame)

    async def _answer_pass(self, sender: NodeId, frame: Frame) -> Frame:
        chain = self._chain(frame.read(PassQuestion).layers)
        return refused(PASS, _NOT_HELD) if chain is None else await chain.answer(sender, frame)

    async def take(self, sender: NodeId, frame: Frame) -> Frame:
        """Take a tensor that a neighbour hands to one of the stages."""
        chain = self._chain(frame.read(HandedTensor).layers)
        return refused(HAND, _NOT_HELD) if chain is None else await chain.take(sender, frame)

    def _chain(self, layers: LayerRange) -> ChainRequestHandler | None:
        endpoint = self._held.get(layers)
        return None if endpoint is None else endpoint.chain


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RefusedTensorError("A required tensor is missing.")
    return tensor
