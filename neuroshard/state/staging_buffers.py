"""Host memory for one checkpoint: the compute thread copies into it, and the writer thread writes it to the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from threading import Lock

import torch
from torch import Tensor

from neuroshard.state.system_resources import forget_contents
from neuroshard.state.tensor_file import TensorLayout, bytes_of


class StagingBuffers:
    """Host copies of all tensors of a layout, in one allocation of `allocated_bytes`.

    Tensors named in `by_reference` are not copied but kept as they are given: for values that are replaced and never
    changed in place, such as the anchor and velocity of an OuterState. This saves 8 bytes per parameter.
    """

    def __init__(self, layout: TensorLayout, by_reference: Set[str] = frozenset(), *, pinned: bool = False) -> None:
        self.layout = layout
        self._references: dict[str, Tensor | None] = dict.fromkeys(by_reference)
        self._pinned = pinned
        owned = {name: spec for name, spec in layout.specs.items() if name not in by_reference}
        self.allocated_bytes = sum(spec.stop - spec.start for spec in owned.values())
        # zeros, not empty: the pages are allocated now, so the first copy is as fast as the others
        self._memory = torch.zeros(self.allocated_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._views: dict[str, Tensor] = {}
        position = 0
        for name, spec in owned.items():  # layout order is widest type first, so every view is aligned
            size = spec.stop - spec.start
            self._views[name] = self._memory[position : position + size].view(spec.dtype).view(spec.shape)
            position += size
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
        on_device = False
        for name, tensor in tensors.items():
            spec = self.layout.specs[name]
            if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise ValueError(f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, the layout says {spec}")
            if name in self._references:
                if tensor.device.type != "cpu" or not tensor.is_contiguous():
                    raise ValueError(f"tensor {name} must be contiguous on the CPU to be kept by reference")
                self._references[name] = tensor.detach()
            else:
                self._views[name].copy_(tensor.detach(), non_blocking=self._pinned)
                on_device = on_device or tensor.device.type == "cuda"
        if on_device:
            torch.cuda.current_stream().synchronize()

    def destination(self, name: str) -> Tensor:
        """Return the tensor to read a checkpoint's tensor into: the buffer, or new memory for one kept by reference."""
        if name not in self._references:
            return self._views[name]
        spec = self.layout.specs[name]
        fresh = torch.empty(spec.shape, dtype=spec.dtype)
        self._references[name] = fresh
        return fresh

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers' tensors by name. The next copy_from changes the copied ones."""
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
