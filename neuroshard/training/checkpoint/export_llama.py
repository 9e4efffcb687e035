"""`checkpoint export --format hf`: saved stages as one Hugging Face Llama folder.

The bytes go from file to file, a few megabytes at a time: the layout of our files and theirs differ only in names.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from neuroshard.config.atomic_write import TEMPORARY_PREFIX, is_disk_full, sync_folder
from neuroshard.data.tokenizer.byte_level import huggingface_tokenizer, huggingface_tokenizer_config
from neuroshard.errors import CheckpointError, DiskFullError, StorageError
from neuroshard.model.llama_export import generation_config, llama_config, llama_parts
from neuroshard.model.tensor_schema import TensorSchema
from neuroshard.model.transformer import StageModel
from neuroshard.training.checkpoint.catalogue import DamagedStageError, SavedStage
from neuroshard.training.checkpoint.metadata import unreadable
from neuroshard.training.checkpoint.tensor_file import (
    CHUNK_BYTES,
    TensorLayout,
    TensorSpec,
    read_layout,
    write_tensor_file,
)

if TYPE_CHECKING:
    from pathlib import Path

    from neuroshard.data.tokenizer.table import TokenizerTable
    from neuroshard.types import Architecture, JsonValue

WEIGHTS = "model/"
TENSORS_FILE = "model.safetensors"


def export_huggingface(stages: Sequence[SavedStage], folder: Path, table: TokenizerTable | None = None) -> None:
    """Write the folder, whole or not at all, from stages that are a whole model in the order of their layers.

    `folder` must not exist, or be empty; without a table it gets no tokenizer. Every file's digest is checked on the
    way. Raises DamagedStageError, StorageError.
    """
    folder, architecture = folder.absolute(), stages[0].architecture
    sources = [(stage, stage_layout(stage)) for stage in stages]
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}-{secrets.token_hex(4)}")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise StorageError(f"{folder} is not empty.", "Name a new folder: nothing is overwritten.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        for name, content in _descriptions(architecture, table).items():
            (temporary / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        with (temporary / TENSORS_FILE).open("xb") as file:
            write_tensor_file(file, _llama_layout(sources, architecture), _weights_of(sources))
            file.flush()
            os.fsync(file.fileno())
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        kind = DiskFullError if is_disk_full(error) else StorageError
        raise kind(f"{folder} cannot be written: {error.strerror or error}.", "Free space or name another.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _descriptions(architecture: Architecture, table: TokenizerTable | None) -> dict[str, dict[str, JsonValue]]:
    """Every file of the folder but the weights."""
    ids = architecture.vocabulary_size if table is None else table.next_merge_id
    files = {"config.json": llama_config(architecture), "generation_config.json": generation_config(architecture, ids)}
    if table is not None:
        files["tokenizer.json"] = huggingface_tokenizer(table)
        files["tokenizer_config.json"] = huggingface_tokenizer_config(table, architecture.sequence_length)
    return files


def stage_layout(stage: SavedStage) -> TensorLayout:
    """Where the tensors of a saved stage lie. Raises DamagedStageError when they are not those of its layers."""
    try:
        with stage.tensor_file.open("rb") as file:
            layout, _ = read_layout(file, stage.tensor_file.stat().st_size)
    except OSError as error:
        raise unreadable(stage.tensor_file, error) from error
    except CheckpointError as error:
        raise DamagedStageError(stage, error.message) from error
    with torch.device("meta"):
        schema = TensorSchema.of(StageModel(stage.architecture, stage.layers))
    expected = {WEIGHTS + name: shape for name, shape in zip(schema.names, schema.shapes, strict=True)}
    found = {name: spec.shape for name, spec in layout.specs.items() if name.startswith(WEIGHTS)}
    if found != expected:
        odd = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise DamagedStageError(stage, f"the weights of its layers are not all there, {odd[0]} for one.")
    return layout


def _llama_layout(sources: Sequence[tuple[SavedStage, TensorLayout]], architecture: Architecture) -> TensorLayout:
    """The tensors of the exported file: those of the stages one after the other, in the order of their bytes."""
    specs: dict[str, TensorSpec] = {}
    position = 0
    for _, layout in sources:
        for name, spec in layout.specs.items():
            if not name.startswith(WEIGHTS):
                continue
            for part in llama_parts(name.removeprefix(WEIGHTS), spec.shape[0], architecture):
                shape = (part.stop - part.start, *spec.shape[1:])
                specs[part.name] = TensorSpec(spec.dtype, shape, position)
                position = specs[part.name].stop
    return TensorLayout(specs)


def _weights_of(sources: Sequence[tuple[SavedStage, TensorLayout]]) -> Iterator[memoryview]:
    """The bytes of all weights. What is yielded is overwritten by the next. Raises DamagedStageError."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for stage, layout in sources:
        try:
            yield from _weights_of_stage(stage, layout, buffer)
        except OSError as error:
            raise DamagedStageError(stage, f"it cannot be read: {error.strerror or error}.") from error


def _weights_of_stage(stage: SavedStage, layout: TensorLayout, buffer: memoryview) -> Iterator[memoryview]:
    with stage.tensor_file.open("rb") as file:
        _, header = read_layout(file, stage.tensor_file.stat().st_size)
        digest = sha256(header)
        for name, spec in layout.specs.items():
            for start in range(spec.start, spec.stop, CHUNK_BYTES):
                piece = buffer[: min(spec.stop - start, CHUNK_BYTES)]
                if file.readinto(piece) != len(piece):
                    raise DamagedStageError(stage, "its tensors end too early.")
                digest.update(piece)
                if name.startswith(WEIGHTS):
                    yield piece
    if digest.hexdigest() != stage.manifest.tensors.sha256:
        raise DamagedStageError(stage, "its SHA-256 is not the one it was written with.")
