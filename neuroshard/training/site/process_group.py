"""The process group of a site: how commands, tensors and sums travel between its ranks, by torch.distributed."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed
from torch import Tensor

from neuroshard.decoders import json_decoder, msgpack_decoder
from neuroshard.errors import UsageError
from neuroshard.training.site.commands import RankFacts, TensorForm
from neuroshard.training.site.plan import SitePlan

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
LOCAL_ADDRESSES = frozenset({"", "localhost", "127.0.0.1", "::1"})  # all ranks are on this computer
NEVER = timedelta(days=365)  # ranks wait for the next command as long as the node is paused
LOOK_SECONDS = 0.05
SHORT_BYTES = 1024  # a message up to this size is one transfer
_TYPES = {str(kind): kind for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)}
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}

_TRANSPORT = re.compile(r"gloo[/\\]transport|connection (?:closed|reset)|[a-z]ccl\b|timed out|timeout", re.IGNORECASE)

T = TypeVar("T")
dist = cast("Any", torch.distributed)  # most of it is not typed


class LostRankError(Exception):
    """A rank has ended, has not answered in time, or could not compute its part of a pass."""

    def __init__(self, rank: int | None, reason: str, *, is_explained: bool = False) -> None:
        super().__init__(reason)
        self.is_explained = is_explained  # otherwise the end of a process may name a better reason
        self.rank = rank  # the one that failed; None if the transfer was between all of them


def first_line(error: Exception) -> str:
    """First line of an error's text, without a full stop; the name of its type if it has no text."""
    return str(error).strip().partition("\n")[0][:200].rstrip(".") or type(error).__name__


def is_transport_error(error: Exception) -> bool:
    """Whether torch.distributed reports that a transfer failed or took too long.

    Only some of its errors have types of their own: gloo raises RuntimeError, whose text begins with the source file.
    A GPU's own errors, of which one is a kernel that "timed out", are not transport errors.
    """
    if isinstance(error, dist.DistError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return False
    return isinstance(error, RuntimeError) and _TRANSPORT.search(str(error)) is not None


def form_of(tensor: Tensor | None) -> TensorForm | None:
    """Form of a tensor that is sent after a message."""
    return None if tensor is None else TensorForm(str(tensor.dtype), tuple(tensor.shape))


def empty_of(form: TensorForm) -> Tensor:
    """A CPU tensor of a form, without values. Raises ValueError for another type than those that ranks send."""
    if form.dtype not in _TYPES:
        raise ValueError(f"ranks send no tensors of type {form.dtype}")
    return torch.empty(form.shape, dtype=_TYPES[form.dtype])


Waiting = Callable[[], None]
"""Called while a rank waits for others; it raises an error if waiting is useless."""


def meet(plan: SitePlan, facts: RankFacts, folder: Path | None, seconds: float, waiting: Waiting) -> Any:
    """Find all ranks and compare their facts; `folder` is that of the meeting file, if there is no address.

    Raises UsageError for ranks that do not fit together, and LostRankError if a rank does not come within `seconds`.
    """
    limit = timedelta(seconds=seconds)
    try:
        if folder is not None:
            store = dist.FileStore(str(folder / "ranks"), facts.width)
        else:
            serves = plan.rank == 0 and not plan.has_store
            store = dist.TCPStore(plan.address, plan.port, None, serves, limit, wait_for_workers=False)
        store = dist.PrefixStore("neuroshard/site", store)
        store.set(f"rank/{plan.rank}", msgspec.json.encode(facts).decode())
        began = time.monotonic()
        for rank in range(facts.width):
            while not store.check([f"rank/{rank}"]):
                waiting()
                if time.monotonic() - began > seconds:
                    raise LostRankError(rank, f"it has not come within {seconds:g} s")
                time.sleep(LOOK_SECONDS)
            other = cast("RankFacts", json_decoder(RankFacts).decode(store.get(f"rank/{rank}")))
            if difference := facts.difference(other):
                raise UsageError(
                    f"Rank {rank} of the site has {difference}.", "Start all ranks with the same program and options."
                )
    except RuntimeError as error:  # all errors of a store
        raise LostRankError(0, f"the ranks cannot meet: {first_line(error)}") from error
    return store


class ProcessGroup:
    """All ranks of a site, seen from one of them. Transfers raise LostRankError.

    Commands wait without a limit, all other transfers at most `timeout_seconds`. Tensors of microbatches travel on the
    CPU; gradients and weights travel from device to device. Only one thread uses it, and a process has at most one.
    """

    def __init__(self, plan: SitePlan, facts: RankFacts, store: Any, timeout_seconds: float) -> None:
        """Connect this rank with all others; `store` is that of `meet`."""
        self.width, self.rank = facts.width, plan.rank
        self._timeout_seconds = timeout_seconds
        self._number = 0
        if plan.address in LOCAL_ADDRESSES:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        if facts.device == "cuda":  # a transfer that fails must raise here; by default it ends the process
            os.environ.update(TORCH_NCCL_BLOCKING_WAIT="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
        limit = timedelta(seconds=timeout_seconds)

        def connect() -> Any:
            backend = _BACKENDS[facts.device]
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.width, timeout=limit)
            return dist.new_group(backend="gloo", timeout=NEVER)

        self._commands = self._try(None, connect)

    @property
    def number(self) -> int:
        """Number of the newest command."""
        return self._number

    def command(self, body: bytes) -> None:
        """As rank 0, send a command to all other ranks."""
        self._number += 1
        self._broadcast_bytes(self._number.to_bytes(8, "little") + body, self._commands)

    def next_command(self) -> bytes:
        """As another rank, wait for the next command. Raises LostRankError if a command was missed."""
        data = self._broadcast_bytes(b"", self._commands)
        self._number += 1
        if (number := int.from_bytes(data[:8], "little")) != self._number:
            raise LostRankError(0, f"rank {self.rank} expects command {self._number}, and command {number} came")
        return data[8:]

    def send_all(self, body: bytes) -> bytes:
        """Send bytes from rank 0 to all; every rank returns them. The other ranks pass b""."""
        return self._broadcast_bytes(body, None)

    def _broadcast_bytes(self, body: bytes, group: Any) -> bytes:
        packed = _packed(body)
        self._broadcast(packed, group)
        length, short = _unpacked(packed)
        if length <= SHORT_BYTES - 8:
            return short
        rest = _bytes_tensor(body) if self.rank == 0 else torch.empty(length, dtype=torch.uint8)
        self._broadcast(rest, group)
        return rest.numpy().tobytes()

    def _broadcast(self, tensor: Tensor, group: Any) -> None:
        """Broadcast from rank 0, which waits no longer than for any other transfer."""
        work = self._try(None, lambda: dist.broadcast(tensor, 0, group=group, async_op=True))
        limit = timedelta(seconds=self._timeout_seconds)
        self._try(None, lambda: work.wait(limit) if self.rank == 0 else work.wait())

    def send(self, body: bytes, to: int) -> None:
        """Send a message to one rank."""
        packed = _packed(body)
        self._try(to, lambda: dist.send(packed, to))
        if len(body) > SHORT_BYTES - 8:
            self._try(to, lambda: dist.send(_bytes_tensor(body), to))

    def receive(self, source: int, form: type[T]) -> T:
        """Receive a message of one rank."""
        packed = torch.empty(SHORT_BYTES, dtype=torch.uint8)
        self._try(source, lambda: dist.recv(packed, source))
        length, data = _unpacked(packed)
        if length > SHORT_BYTES - 8:
            rest = torch.empty(length, dtype=torch.uint8)
            self._try(source, lambda: dist.recv(rest, source))
            data = rest.numpy().tobytes()
        return cast("T", msgpack_decoder(form).decode(data))

    def send_tensors(self, tensors: Sequence[Tensor | None], to: int) -> None:
        """Send tensors to one rank, which knows their forms."""
        for tensor in tensors:
            if tensor is not None:
                contiguous = tensor.detach().cpu().contiguous()
                self._try(to, lambda sent=contiguous: dist.send(sent, to))

    def receive_tensors(self, forms: Sequence[TensorForm | None], source: int) -> list[Tensor | None]:
        """Receive tensors of these forms."""
        tensors = [None if form is None else empty_of(form) for form in forms]
        for tensor in tensors:
            if tensor is not None:
                self._try(source, lambda filled=tensor: dist.recv(filled, source))
        return tensors

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give these tensors rank 0's values on all ranks."""
        for tensor in tensors:
            self._try(None, lambda shared=tensor: dist.broadcast(shared, 0))

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Give these tensors the sum of all ranks' values."""
        works = [self._try(None, lambda added=tensor: dist.all_reduce(added, async_op=True)) for tensor in tensors]
        for work in works:
            if work is not None:
                self._try(None, work.wait)

    def _try(self, rank: int | None, transfer: Callable[[], T]) -> T:
        try:
            return transfer()
        except RuntimeError as error:  # torch.distributed raises no others
            raise self.lost(error, rank) from error

    def lost(self, error: Exception, rank: int | None = None) -> LostRankError:
        """The meaning of an error of a transfer with `rank`, or of this rank's part of a pass.

        A transport error means that another rank is lost; any other one is a failure of this rank.
        """
        if isinstance(error, LostRankError):
            return error
        if isinstance(error, torch.OutOfMemoryError):
            return LostRankError(self.rank, "out of memory", is_explained=True)
        if not is_transport_error(error):
            return LostRankError(self.rank, first_line(error), is_explained=True)
        late = any(words in str(error).lower() for words in ("timed out", "timeout"))
        reason = f"no answer for {self._timeout_seconds:g} s" if late else "the connection has ended"
        return LostRankError(rank, reason, is_explained=late)

    def close(self) -> None:
        """End the group. Transfers of other threads fail."""
        dist.destroy_process_group()


def _packed(body: bytes) -> Tensor:
    """Length and beginning of a message in a tensor of SHORT_BYTES."""
    first = body if len(body) <= SHORT_BYTES - 8 else b""
    return _bytes_tensor((len(body).to_bytes(8, "little") + first).ljust(SHORT_BYTES, b"\0"))


def _unpacked(packed: Tensor) -> tuple[int, bytes]:
    """Length of a message, and the message itself if it is short."""
    data = packed.numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    return length, data[8 : 8 + length]


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
