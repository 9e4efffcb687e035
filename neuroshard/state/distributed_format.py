"""Writes tensors in the format of torch.distributed.checkpoint, where a tensor may have a second name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.checkpoint.storage import WriteResult


class _WriterOfNames(FileSystemWriter):
    """A writer whose index lists some tensors under a second name too. Their bytes are in the files once."""

    def __init__(self, folder: Path, second_names: Mapping[str, str]) -> None:
        super().__init__(folder)  # pyright: ignore[reportUnknownMemberType]
        self._second_names = second_names

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for name, second in self._second_names.items():
            metadata.state_dict_metadata[second] = metadata.state_dict_metadata[name]
            metadata.planner_data[second] = (second,)
        written = [result for group in results for result in group]
        again = [
            replace(result, index=replace(result.index, fqn=self._second_names[result.index.fqn]))
            for result in written
            if result.index.fqn in self._second_names
        ]
        super().finish(metadata, [written, again])


def save_distributed(tensors: Mapping[str, Tensor], folder: Path, second_names: Mapping[str, str]) -> None:
    """Write tensors as the only process. `second_names` maps names to further names of the same tensors.

    Raises OSError, which PyTorch wraps in a BaseException of its own.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(dict(tensors), storage_writer=_WriterOfNames(folder, second_names), no_dist=True)
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            cause: BaseException | None = failure
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__  # on a full disk a later RuntimeError covers it
            if cause is not None:
                raise cause from None
        raise
