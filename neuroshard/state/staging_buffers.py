"""Host memory for one checkpoint: the compute thread copies into it, and the writer thread writes it to the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from neuroshard.errors import StorageError
from neuroshard.optim.inner_optimizer import PINNED_KINDS
from neuroshard.state.system_resources import forget_contents
from neuroshard.state.tensor_file import TensorLayout, bytes_of


class StagingBuffers:
    """Host copies of all tensors of a layout, in one allocation of `allocated_bytes`.

    Tensors named in `by_reference` are not copied but kept as they are given: for values that are replaced and never
    changed in place, such as the anchor and velocity of an OuterState. This saves 8 bytes per parameter.

    From a CUDA or XPU device with room for a second copy, `copy_from` only copies within the device, which takes
    milliseconds. The transfer to the host then runs during training, and a reader of the buffers waits for it.
    """

    def __init__(self, layout: TensorLayout, by_reference: Set[str] = frozenset(), *, pinned: bool = False) -> None:
        self.layout = layout
        self._references: dict[str, Tensor | None] = dict.fromkeys(by_reference)
        self._pinned = pinned
        owned = {name: spec for name, spec in layout.specs.items() if name not in by_reference}
        self.allocated_bytes = sum(spec.stop - spec.start for spec in owned.values())
        # zeros, not empty: the pages are allocated now, so the first copy is as fast as the others
        self._memory = torch.zeros(self.allocated_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._owned = owned
        self._views = self._views_of(self._memory)
        self._transfer: _Transfer | None = None
        self._busy = Lock()

    @property
    def in_use(self) -> bool:
        """Whether a writer still reads the buffers."""
        return self._busy.locked()

    def copy_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all tensors of the layout; runs on the thread that owns them and returns when they may change again.

        Raises RuntimeError while the buffers are in use, ValueError when the tensors are not those of the layout.
        """
        if self.in_use:
            raise RuntimeError("the staging buffers are still being written")
        if tensors.keys() != self.layout.specs.keys():
            odd = sorted(tensors.keys() ^ self.layout.specs.keys())
            raise ValueError(f"the tensors are not those of the layout: {odd[:5]}")
        self._wait_for_transfer()
        owned: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            spec = self.layout.specs[name]
            if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise ValueError(f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, the layout says {spec}")
            if name in self._references:
                if tensor.device.type != "cpu" or not tensor.is_contiguous():
                    raise ValueError(f"tensor {name} must be contiguous on the CPU to be kept by reference")
                self._references[name] = tensor.detach()
            elif tensor.device.type in PINNED_KINDS:
                owned[name] = tensor.detach()
            else:  # at once: the tensor may have been gathered for this, and is not kept
                self._views[name].copy_(tensor.detach())
        devices = {tensor.device for tensor in owned.values()}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        if device.type in PINNED_KINDS and _has_room(device, self.allocated_bytes):
            snapshot = torch.empty(self.allocated_bytes, dtype=torch.uint8, device=device)
            _copy_all(self._views_of(snapshot), owned)
            self._transfer = _Transfer(snapshot, self._memory)
        else:
            _copy_all(self._views, owned)

    def destination(self, name: str) -> Tensor:
        """Return the tensor to read a checkpoint's tensor into: the buffer, or new memory for one kept by reference."""
        self._wait_for_transfer()
        if name not in self._references:
            return self._views[name]
        spec = self.layout.specs[name]
        fresh = torch.empty(spec.shape, dtype=spec.dtype)
        self._references[name] = fresh
        return fresh

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers' tensors by name. The next copy_from changes the copied ones."""
        self._wait_for_transfer()
        held: dict[str, Tensor] = {}
        for name in self.layout.specs:
            reference = self._references.get(name)
            held[name] = self._views[name] if reference is None else reference
        return held

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes of all tensors in layout order."""
        for tensor in self.tensors().values():
            yield bytes_of(tensor)

    def forget(self) -> None:
        """Free the memory until the next copy, and drop the references, unless a writer reads them."""
        if self.in_use:
            return
        self._wait_for_transfer()
        self._drop_references()
        if not self._pinned:
            forget_contents(self._memory)

    def claim(self) -> None:
        """Reserve the buffers for a writer. Raises RuntimeError when they are reserved already."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("the staging buffers are already being written")

    def release(self) -> None:
        """Allow the next copy and drop the references."""
        self._drop_references()
        self._busy.release()

    def _drop_references(self) -> None:
        for name in self._references:
            self._references[name] = None

    def _wait_for_transfer(self) -> None:
        transfer, self._transfer = self._transfer, None  # frees the memory on the device, also after a failure
        if transfer is not None:
            transfer.wait()

    def _views_of(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the copied tensors' places in a memory (allocated_bytes,) of uint8."""
        views: dict[str, Tensor] = {}
        position = 0
        for name, spec in self._owned.items():  # layout order is widest type first, so every view is aligned
            size = spec.stop - spec.start
            views[name] = memory[position : position + size].view(spec.dtype).view(spec.shape)
            position += size
        return views


class _Transfer:
    """Copies a snapshot on a device to pinned host memory, on a stream of its own."""

    def __init__(self, snapshot: Tensor, memory: Tensor) -> None:
        self._snapshot = snapshot  # kept until the end: the allocator does not know that another stream reads it
        accelerator: Any = torch.get_device_module(snapshot.device)  # torch.cuda or torch.xpu
        stream = accelerator.Stream(snapshot.device)
        stream.wait_stream(accelerator.current_stream(snapshot.device))
        with accelerator.stream(stream):
            memory.copy_(snapshot, non_blocking=True)
            self._end = stream.record_event()

    def wait(self) -> None:
        """Wait for the end of the copy. Raises StorageError if the device has failed: its snapshot cannot be read."""
        try:
            self._end.synchronize()
        except RuntimeError as error:
            raise StorageError("The accelerator failed before the checkpoint was copied from it.") from error


def _has_room(device: torch.device, size: int) -> bool:
    """Whether `size` bytes fit in addition to the largest amount of memory that training has used on the device."""
    accelerator: Any = torch.get_device_module(device)
    try:
        free, _ = accelerator.mem_get_info(device)
    except RuntimeError:  # some XPU devices do not show their free memory
        return False
    return free + accelerator.memory_reserved(device) - accelerator.max_memory_allocated(device) >= size


def _copy_all(to: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors. Copies to the host are complete when this returns; within a device they are in stream order."""
    for name, tensor in tensors.items():
        to[name].copy_(tensor)
