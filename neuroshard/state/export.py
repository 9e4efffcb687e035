"""`checkpoint export`: saved stages as one model for other programs.

`--format torch` writes the keys of the classic NeuroShard file, readable with weights_only=True. `--format hf` writes a
Hugging Face folder: the bytes go from file to file, a few megabytes at a time, because the two layouts differ only in
names. Matrices with factors of a subspace are multiplied out. The class is Llama, Qwen3 or OLMo 2, by the options of
the model. `--format gguf` writes one file for llama.cpp:
rows of Llama's queries and keys change places, because llama.cpp rotates neighbouring pairs of Llama by RoPE where
Hugging Face's layout rotates the halves of a head. `--format dcp` writes a folder for torch.distributed.checkpoint with
TorchTitan's names, and with the rows in the same order as in GGUF. Scales that the run does not train are written as
ones."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from neuroshard.config.state_file import TEMPORARY_PREFIX, is_disk_full, sync_folder
from neuroshard.data.chat_template import JINJA
from neuroshard.data.tokenizer.byte_level import (
    huggingface_tokenizer,
    huggingface_tokenizer_config,
    merge_texts,
    token_texts,
)
from neuroshard.data.tokenizer.table import (
    BOS,
    EOS,
    FIRST_BYTE_ID,
    LLAMA_PATTERN,
    PAD,
    SPLIT_PATTERN,
    UNK,
    TokenizerTable,
)
from neuroshard.errors import CheckpointError, DiskFullError, StorageError, UsageError
from neuroshard.model.llama_layout import (
    ROTATED,
    earlier_titan_names,
    generation_config,
    llama_config,
    llama_parts,
    titan_config,
    titan_parts,
    titan_unit_scales,
    unit_scales,
)
from neuroshard.model.model_class import class_of, export_objection
from neuroshard.model.subspace import Subspace, is_factor, matrix_of
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema
from neuroshard.optim.outer import replica_mean
from neuroshard.state.checkpoint_catalogue import DamagedStageError, SavedStage
from neuroshard.state.checkpoint_manifest import unreadable
from neuroshard.state.model_card import CARD_NAME, model_card, modelfile
from neuroshard.state.outer_state import lead_from_json
from neuroshard.state.stage_tensors import ANCHOR, VELOCITY
from neuroshard.state.tensor_file import (
    CHUNK_BYTES,
    StoredTensor,
    TensorLayout,
    map_tensor_file,
    read_layout,
    write_tensor_file,
)

if TYPE_CHECKING:
    from pathlib import Path

    from neuroshard.state.checkpoint_manifest import CheckpointMeta
    from neuroshard.types import Architecture, JsonValue


_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def export_torch(stages: Sequence[SavedStage], path: Path) -> None:
    """Write stages that follow each other, whole or not at all. Raises DamagedStageError, StorageError.

    Their tensors are mapped, not read; of several stages the two vectors of the outer state are joined in memory.
    """
    parts = [(stage.manifest.meta, _tensors(stage)) for stage in stages]
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            torch.save(classic_content(parts), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {error}.", "Name a folder with enough space.") from error


def classic_content(parts: Sequence[tuple[CheckpointMeta, Mapping[str, Tensor]]]) -> dict[str, object]:
    """Return the classic keys: `layers` has {layer id: {name: tensor}}, `outside_layers` all other tensors.

    With several stages, each count is the smallest of all stages, and `stages` has each stage's own. With a subspace,
    `layers` and `outside_layers` have whole matrices, `optimizer` and `diloco` the factors that are trained.
    """
    metas = [meta for meta, _ in parts]
    subspace = _subspace_of(metas[0])
    layers: dict[int, dict[str, Tensor]] = {}
    outside: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Tensor]] = {}
    for _, tensors in parts:
        for name, tensor in (_ordinary(*item, subspace) for item in _under("model/", tensors).items()):
            if match := _LAYER.fullmatch(name):
                layers.setdefault(int(match[1]), {})[match[2]] = tensor
            else:
                outside[name] = tensor
        optimizer |= _optimizer_state(tensors)
    return {
        "layer_ids": [layer for meta in metas for layer in range(meta.layers.start, meta.layers.stop)],
        "architecture": asdict(metas[0].architecture),
        "layers": layers,
        "outside_layers": outside,
        "optimizer": {"state": optimizer},
        "diloco": {
            **_joined([_under("outer/", tensors) for _, tensors in parts]),
            "outer_step": min(meta.outer_step for meta in metas),
            "inner_step": min(meta.inner_step for meta in metas),
        },
        "training_rounds": min(meta.step for meta in metas),
        "current_loss": next((meta.loss for meta in reversed(metas) if meta.loss is not None), None),
        "timestamp": min(meta.time for meta in metas),
        "stages": [_summary(meta) for meta in metas],
    }


def _subspace_of(meta: CheckpointMeta) -> Subspace | None:
    """The subspace of the model, None without one. Raises CheckpointError if the state does not name its seed."""
    if meta.architecture.subspace_rank == 0:
        return None
    if meta.subspace_seed is None:
        raise CheckpointError("The saved state does not name the seed of its subspace.", "Use a state of a newer node.")
    return Subspace(meta.architecture, meta.subspace_seed)


def _ordinary(name: str, tensor: Tensor, subspace: Subspace | None) -> tuple[str, Tensor]:
    """A parameter, or the whole matrix with this factor, with its name."""
    if subspace is None or not is_factor(name):
        return name, tensor
    whole, _ = matrix_of(name, tensor.shape, subspace.basis.shape[0])
    return whole, torch.cat(list(subspace.rows_of_matrix(name, tensor)))


def _tensors(stage: SavedStage) -> dict[str, Tensor]:
    try:
        return map_tensor_file(stage.tensor_file, stage.manifest.tensors.sha256)
    except CheckpointError as error:
        raise DamagedStageError(stage, error.message) from error


def _joined(outer: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the stages' vectors into those of the whole model: parameters are in the order of the layers."""
    if len(outer) == 1:
        return dict(outer[0])
    return {name: torch.cat([vectors[name] for vectors in outer]) for name in outer[0]}


def _summary(meta: CheckpointMeta) -> dict[str, object]:
    return {
        "layer_ids": list(range(meta.layers.start, meta.layers.stop)),
        "training_rounds": meta.step,
        "outer_step": meta.outer_step,
        "inner_step": meta.inner_step,
        "timestamp": meta.time,
    }


def _optimizer_state(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _under("inner/", tensors).items():
        parameter, _, moment = name.rpartition("/")
        state.setdefault(parameter, {})[moment] = tensor
    return state


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


WEIGHTS = "model/"
TENSORS_FILE = "model.safetensors"


def export_huggingface(stages: Sequence[SavedStage], folder: Path, table: TokenizerTable | None = None) -> None:
    """Write the folder, whole or not at all, from stages that are a whole model in the order of their layers.

    `folder` must not exist, or be empty; without a table it gets no tokenizer. Every file's digest is checked on the
    way. Raises DamagedStageError, StorageError, and UsageError for options that no class of transformers has.
    """
    folder, architecture = folder.absolute(), stages[0].architecture
    _check_class(architecture)
    sources = [(stage, stage_layout(stage)) for stage in stages]
    with _new_folder(folder) as temporary:
        for name, content in _descriptions(architecture, table).items():
            (temporary / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (temporary / CARD_NAME).write_text(model_card(stages, table, library="transformers"), encoding="utf-8")
        with (temporary / TENSORS_FILE).open("xb") as file:
            weights = chain(_weights_of(sources), _ones(unit_scales(architecture).values()))
            write_tensor_file(file, _llama_layout(sources, architecture), weights)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def _new_folder(folder: Path) -> Generator[Path]:
    """A folder to fill, which becomes `folder` when the block ends, or is gone after an error. Raises StorageError."""
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}-{secrets.token_hex(4)}")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise StorageError(f"{folder} is not empty.", "Name a new folder. Existing files are never overwritten.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        kind = DiskFullError if is_disk_full(error) else StorageError
        raise kind(f"{folder} cannot be written: {error.strerror or error}.", "Free space or name another.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_class(architecture: Architecture) -> None:
    objection = export_objection(architecture)
    if objection is not None:
        raise UsageError(objection, "Use --format torch or --format dcp.")


def _descriptions(architecture: Architecture, table: TokenizerTable | None) -> dict[str, dict[str, JsonValue]]:
    """Return every file of the folder except the weights."""
    ids = architecture.vocabulary_size if table is None else table.next_merge_id
    files = {"config.json": llama_config(architecture), "generation_config.json": generation_config(architecture, ids)}
    if table is not None:
        files["tokenizer.json"] = huggingface_tokenizer(table)
        files["tokenizer_config.json"] = huggingface_tokenizer_config(table, architecture.sequence_length)
    return files


def stage_layout(stage: SavedStage) -> TensorLayout:
    """Return the tensor layout of a saved stage.

    Raises DamagedStageError if the file does not match the stage's layers, or is missing: a running node deletes old
    states at any time. Raises StorageError for a file that this user may not read.
    """
    try:
        with stage.tensor_file.open("rb") as file:
            layout, _ = read_layout(file, stage.tensor_file.stat().st_size)
    except PermissionError as error:
        raise unreadable(stage.tensor_file, error) from error
    except OSError as error:
        raise DamagedStageError(stage, unreadable(stage.tensor_file, error).message) from error
    except CheckpointError as error:
        raise DamagedStageError(stage, error.message) from error
    with torch.device("meta"):
        schema = TensorSchema.of(StageModel(stage.architecture, stage.layers))
    expected = {WEIGHTS + name: shape for name, shape in zip(schema.names, schema.shapes, strict=True)}
    found = {name: spec.shape for name, spec in layout.specs.items() if name.startswith(WEIGHTS)}
    if found != expected:
        odd = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise DamagedStageError(stage, f"some weights of its layers are missing, such as {odd[0]}.")
    return layout


def _llama_layout(sources: Sequence[tuple[SavedStage, TensorLayout]], architecture: Architecture) -> TensorLayout:
    """Return the layout of the exported file: the stages' tensors in sequence, in the order of their bytes."""
    specs: dict[str, StoredTensor] = {}
    position = 0
    for _, layout in sources:
        for name, spec in layout.specs.items():
            if not name.startswith(WEIGHTS):
                continue
            whole, whole_shape = matrix_of(name.removeprefix(WEIGHTS), spec.shape, architecture.hidden_size)
            for part in llama_parts(whole, whole_shape[0], architecture):
                shape = (part.stop - part.start, *whole_shape[1:])
                specs[part.name] = StoredTensor(spec.dtype, shape, position)
                position = specs[part.name].stop
    for name, size in unit_scales(architecture).items():
        specs[name] = StoredTensor(torch.float32, (size,), position)
        position = specs[name].stop
    return TensorLayout(specs)


def _ones(sizes: Iterable[int]) -> Iterator[memoryview]:
    """Yield the bytes of vectors of ones, which are small: the scales of norms."""
    for size in sizes:
        yield memoryview(np.ones(size, "<f4").tobytes())


def _weights_of(sources: Sequence[tuple[SavedStage, TensorLayout]]) -> Iterator[memoryview]:
    """Yield the bytes of all weights in the order of their files, some at a time. Raises DamagedStageError."""
    subspace = _subspace_of(sources[0][0].manifest.meta)
    for stage, layout in sources:
        weights = SharedWeights(stage)
        for name in (name.removeprefix(WEIGHTS) for name in layout.specs if name.startswith(WEIGHTS)):
            pieces = weights.pieces(name)
            if subspace is not None and is_factor(name):
                pieces = subspace.rows_of_matrix(name, weights[name])
            for piece in pieces:
                yield piece.numpy().data.cast("B")


class SharedWeights(Mapping[str, Tensor]):
    """Weights of a saved stage by name, without "model/": what its run has learned, for other programs.

    After a round of several replicas, this is the mean of their weights in that round: it is better than the weights of
    any one of them. Otherwise it is the stage's own weights.
    """

    def __init__(self, stage: SavedStage) -> None:
        """Map the stage's tensors. Raises DamagedStageError."""
        tensors = _tensors(stage)
        self._own = _under(WEIGHTS, tensors)
        self._lead = lead_from_json(stage.manifest.meta.extra.get("outer"))
        with torch.device("meta"):
            schema = TensorSchema.of(StageModel(stage.architecture, stage.layers, _subspace_of(stage.manifest.meta)))
        vectors = [tensors.get(name) for name in (ANCHOR, VELOCITY)]
        if self._lead is not None and all(one is not None and len(one) == schema.total_size for one in vectors):
            self._outer = [schema.views(one) for one in vectors if one is not None]
        else:
            self._lead, self._outer = None, []

    def __getitem__(self, name: str) -> Tensor:
        own = self._own[name]
        return own if self._lead is None else torch.cat(list(self.pieces(name))).view(own.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor's numbers (n,) in order, so that no whole tensor is in memory."""
        parts = [one[name].reshape(-1) for one in self._outer or [self._own]]
        for start in range(0, len(parts[0]), CHUNK_BYTES // 4):
            some = [part[start : start + CHUNK_BYTES // 4] for part in parts]
            yield some[0] if self._lead is None else replica_mean(some[0], some[1], self._lead)


Matrix = np.ndarray[Any, np.dtype[np.float32]]
# llama.cpp knows patterns by name only: the second of ours, and "gpt-2", which is most like the first.
PRE_TOKENIZERS = {LLAMA_PATTERN: "llama-bpe", SPLIT_PATTERN: "gpt-2"}
NAME = "NeuroShard"


def export_gguf(stages: Sequence[SavedStage], path: Path, table: TokenizerTable) -> None:
    """Write the file, whole or not at all, from stages that are a whole model in the order of their layers.

    `path` must not exist. Every tensor is float32. A Modelfile and a model card are written next to it. Raises
    DamagedStageError, StorageError, and UsageError without `gguf` or for options that llama.cpp has no model of.
    """
    gguf = _gguf()
    architecture, path = stages[0].architecture, path.absolute()
    _check_class(architecture)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")
    companions = {
        path.with_suffix(".Modelfile"): modelfile(path.name, architecture.sequence_length),
        path.with_suffix(".md"): model_card(stages, table, library="gguf"),
    }
    try:
        for place in (path, *companions):
            _check_is_free(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(temporary, class_of(architecture).model_type)
        try:
            _describe(writer, gguf, architecture, table)
            _write_tensors(writer, gguf, stages, architecture)
        finally:
            writer.close()
        with temporary.open("r+b") as file:  # Windows flushes only files open for writing
            os.fsync(file.fileno())
        _check_is_free(path)  # the path may have been taken meanwhile
        for place, text in companions.items():
            place.write_text(text, encoding="utf-8")
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        kind = DiskFullError if is_disk_full(error) else StorageError
        raise kind(f"{path} cannot be written: {error.strerror or error}.", "Free space or name another.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _check_is_free(path: Path) -> None:
    if os.path.lexists(path):
        raise StorageError(f"{path} already exists.", "Name a new file. Existing files are never overwritten.")


def require_gguf() -> None:
    """Raise UsageError with the package to install when `gguf` is missing."""
    _gguf()


def _gguf() -> Any:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise UsageError(
            "--format gguf needs gguf, which is not installed.", "Install it: pip install 'neuroshard[export]'"
        ) from error


def _describe(writer: Any, gguf: Any, architecture: Architecture, table: TokenizerTable) -> None:
    """Write the architecture and tokenizer metadata."""
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
    writer.add_tokenizer_pre(PRE_TOKENIZERS[table.pattern])
    writer.add_token_list([*texts, *(f"<|unused_{identifier}|>" for identifier in unused)])
    writer.add_token_types([*special, *[kinds.NORMAL] * (len(texts) - len(special)), *[kinds.UNUSED] * len(unused)])
    writer.add_token_merges([" ".join(pair) for pair in merge_texts(table, texts)])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(JINJA)


def _write_tensors(writer: Any, gguf: Any, stages: Sequence[SavedStage], architecture: Architecture) -> None:
    """Write the positions of all tensors, then one tensor after the other: at most one is in memory."""
    model = getattr(gguf.MODEL_ARCH, class_of(architecture).model_type.upper())
    names = gguf.get_tensor_name_map(model, architecture.layer_count)

    def announce(name: str, shape: tuple[int, ...]) -> None:
        name_there = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor_info(name_there, shape, np.dtype(np.float32), math.prod(shape) * 4)

    for stage in stages:
        for name, spec in stage_layout(stage).specs.items():
            whole, shape = matrix_of(name.removeprefix(WEIGHTS), spec.shape, architecture.hidden_size)
            for part in llama_parts(whole, shape[0], architecture) if name.startswith(WEIGHTS) else ():
                announce(part.name, (part.stop - part.start, *shape[1:]))
    scales = unit_scales(architecture)
    for name, size in scales.items():
        announce(name, (size,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    subspace = _subspace_of(stages[0].manifest.meta)
    for stage in stages:
        for name, tensor in (_ordinary(*item, subspace) for item in SharedWeights(stage).items()):
            for part in llama_parts(name, tensor.shape[0], architecture):
                rows: Matrix = tensor[part.start : part.stop].to(torch.float32).numpy()
                writer.write_tensor_data(in_neighbouring_pairs(rows, part.name, architecture))
    for size in scales.values():
        writer.write_tensor_data(np.ones(size, np.float32))


def in_neighbouring_pairs(rows: Matrix, name: str, architecture: Architecture) -> Matrix:
    """Reorder Llama's queries and keys so that rows i and i + half of each head are adjacent.

    Other matrices, and all of the other models, stay unchanged: llama.cpp rotates the halves of their heads.
    """
    if class_of(architecture).model_type != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return rows
    return _paired(torch.tensor(rows), architecture).numpy()


def _paired(rows: Tensor, architecture: Architecture) -> Tensor:
    """Rows (n, ...) of whole heads, in which row i and row i + half of a head become neighbours."""
    heads = rows.reshape(-1, 2, architecture.head_size // 2, *rows.shape[1:])  # (heads, halves, pairs, ...)
    return heads.transpose(1, 2).reshape(rows.shape)


CONFIG_NAME = "params.json"


def export_dcp(stages: Sequence[SavedStage], folder: Path) -> None:
    """Write a folder for torch.distributed.checkpoint, whole or not at all, with the names of TorchTitan's Llama.

    The stages are a whole model in the order of their layers. `folder` must not exist, or be empty. All tensors are
    float32. Those that TorchTitan 0.2 names otherwise have both names for the same bytes. Memory holds one copy
    of the queries and keys, and of all weights if they are a mean of replicas. Raises DamagedStageError, StorageError.
    """
    from neuroshard.state.distributed_format import save_distributed  # it loads torch.distributed

    folder, architecture = folder.absolute(), stages[0].architecture
    tensors = dict(_titan_tensors(stages, architecture))
    with _new_folder(folder) as temporary:
        save_distributed(tensors, temporary, earlier_titan_names(tensors))
        (temporary / CONFIG_NAME).write_text(json.dumps(titan_config(architecture), indent=2) + "\n", encoding="utf-8")


def _titan_tensors(stages: Sequence[SavedStage], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its name. Raises DamagedStageError."""
    subspace = _subspace_of(stages[0].manifest.meta)
    for stage in stages:
        stage_layout(stage)
        for name, tensor in (_ordinary(*item, subspace) for item in SharedWeights(stage).items()):
            for part in titan_parts(name, tensor.shape[0], architecture):
                rows = tensor[part.start : part.stop].to(torch.float32)
                yield part.name, _paired(rows, architecture) if part.name.endswith(ROTATED) else rows
    for name, size in titan_unit_scales(architecture).items():
        yield name, torch.ones(size)
