"""`checkpoint export --format gguf`: saved stages as one file for llama.cpp and programs built on it.

The tensors are mapped, not read. Rows of queries and keys change places, because llama.cpp turns neighbouring pairs by
RoPE where Hugging Face's layout turns the halves of a head.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from neuroshard.config.atomic_write import TEMPORARY_PREFIX, is_disk_full, sync_folder
from neuroshard.data.tokenizer.byte_level import merge_texts, token_texts
from neuroshard.data.tokenizer.table import BOS, EOS, FIRST_BYTE_ID, PAD, UNK, TokenizerTable
from neuroshard.errors import CheckpointError, DiskFullError, StorageError, UsageError
from neuroshard.model.llama_export import LlamaPart, llama_parts
from neuroshard.training.checkpoint.catalogue import DamagedStageError, SavedStage
from neuroshard.training.checkpoint.export_llama import WEIGHTS, stage_layout
from neuroshard.training.checkpoint.tensor_file import map_tensor_file

if TYPE_CHECKING:
    from pathlib import Path

    from neuroshard.types import Architecture

Matrix = np.ndarray[Any, np.dtype[np.float32]]
# llama.cpp knows patterns by name, not by themselves: of those it has, this one cuts text most like ours.
PRE_TOKENIZER = "gpt-2"
NAME = "NeuroShard"


def export_gguf(stages: Sequence[SavedStage], path: Path, table: TokenizerTable) -> None:
    """Write the file, whole or not at all, from stages that are a whole model in the order of their layers.

    `path` must not exist. Every tensor is float32. Raises DamagedStageError, StorageError, UsageError without `gguf`.
    """
    gguf = _gguf()
    architecture, path = stages[0].architecture, path.absolute()
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")
    try:
        _check_is_free(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(temporary, "llama")
        try:
            _describe(writer, gguf, architecture, table)
            _write_tensors(writer, gguf, stages, architecture)
        finally:
            writer.close()
        with temporary.open("r+b") as file:  # Windows flushes what may be written only
            os.fsync(file.fileno())
        _check_is_free(path)  # the writing took its time
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        kind = DiskFullError if is_disk_full(error) else StorageError
        raise kind(f"{path} cannot be written: {error.strerror or error}.", "Free space or name another.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _check_is_free(path: Path) -> None:
    if os.path.lexists(path):
        raise StorageError(f"{path} is there already.", "Name a new file: nothing is overwritten.")


def require_gguf() -> None:
    """Raises UsageError that tells what to install."""
    _gguf()


def _gguf() -> Any:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise UsageError(
            "--format gguf needs gguf, which is not installed.", "Install it: pip install 'neuroshard[export]'"
        ) from error


def _describe(writer: Any, gguf: Any, architecture: Architecture, table: TokenizerTable) -> None:
    """Shape and tokenizer."""
    writer.add_name(NAME)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(architecture.sequence_length)
    writer.add_embedding_length(architecture.hidden_size)
    writer.add_block_count(architecture.layer_count)
    writer.add_feed_forward_length(architecture.feed_forward_size)
    writer.add_head_count(architecture.head_count)
    writer.add_head_count_kv(architecture.key_value_head_count)
    writer.add_rope_dimension_count(architecture.head_size)
    writer.add_rope_freq_base(architecture.rope_theta)
    writer.add_layer_norm_rms_eps(architecture.norm_epsilon)
    writer.add_vocab_size(architecture.vocabulary_size)

    texts = token_texts(table)
    unused = range(len(texts), architecture.vocabulary_size)
    kinds = gguf.TokenType
    special = [kinds.UNKNOWN if identifier == UNK else kinds.CONTROL for identifier in range(FIRST_BYTE_ID)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list([*texts, *(f"<|unused_{identifier}|>" for identifier in unused)])
    writer.add_token_types([*special, *[kinds.NORMAL] * (len(texts) - len(special)), *[kinds.UNUSED] * len(unused)])
    writer.add_token_merges([" ".join(pair) for pair in merge_texts(table, texts)])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def _write_tensors(writer: Any, gguf: Any, stages: Sequence[SavedStage], architecture: Architecture) -> None:
    """First where each tensor lies, then one after the other: at most one is in memory."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, architecture.layer_count)
    for stage in stages:
        for name, spec in stage_layout(stage).specs.items():
            for part in _parts(name, spec.shape, architecture):
                shape = (part.stop - part.start, *spec.shape[1:])
                name_there = names.get_name(part.name, try_suffixes=(".weight",))
                writer.add_tensor_info(name_there, shape, np.dtype(np.float32), math.prod(shape) * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for stage in stages:
        for name, tensor in _mapped(stage).items():
            for part in _parts(name, tensor.shape, architecture):
                rows: Matrix = tensor[part.start : part.stop].to(torch.float32).numpy()
                writer.write_tensor_data(in_neighbouring_pairs(rows, part.name, architecture))


def _parts(name: str, shape: Sequence[int], architecture: Architecture) -> tuple[LlamaPart, ...]:
    """None of what is no weight."""
    return llama_parts(name.removeprefix(WEIGHTS), shape[0], architecture) if name.startswith(WEIGHTS) else ()


def _mapped(stage: SavedStage) -> dict[str, Tensor]:
    try:
        return map_tensor_file(stage.tensor_file, stage.manifest.tensors.sha256)
    except CheckpointError as error:
        raise DamagedStageError(stage, error.message) from error


def in_neighbouring_pairs(rows: Matrix, name: str, architecture: Architecture) -> Matrix:
    """Queries and keys with the rows i and i + half of each head side by side; every other matrix as it is."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return rows
    heads = rows.reshape(-1, 2, architecture.head_size // 2, rows.shape[1])  # (heads, halves, pairs, hidden size)
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)
