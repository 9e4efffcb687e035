"""Exported models in other programs: logits in transformers, tokens and words in a real llama.cpp."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from pydoc_data import topics
from types import ModuleType
from typing import Any, Literal

import httpx
import pytest
import torch
import yaml
from torch import Tensor

from neuroshard.data.chat_template import conversation_text
from neuroshard.data.tokenizer import BOS, FIRST_BYTE_ID, Tokenizer, learn_merges
from neuroshard.errors import CheckpointError, StorageError, UsageError
from neuroshard.model.architecture import StagePlan
from neuroshard.model.subspace import Subspace
from neuroshard.model.transformer import StageModel
from neuroshard.state.checkpoint_catalogue import SavedStage, choose, saved_stages
from neuroshard.state.checkpoint_manifest import CheckpointMeta, encode_manifest
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.export import export_dcp, export_gguf, export_huggingface, export_torch, require_gguf
from neuroshard.state.staging_buffers import StagingBuffers
from neuroshard.state.tensor_file import TensorLayout
from neuroshard.training.text_generation import allowed_ids
from neuroshard.types import Architecture, NodeId, RunId, WalletId

SUBSPACE_SEED = 4
CONTEXT = 256  # the least that llama.cpp takes


def made_model(architecture: Architecture, seed: int = 5) -> StageModel:
    """Weights large enough that no two tokens are nearly as likely as each other."""
    subspace = Subspace(architecture, SUBSPACE_SEED) if architecture.subspace_rank else None
    model, generator = StageModel(architecture, None, subspace), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.15 * noise)
    return model


def save_in_stages(model: StageModel, folder: Path, stage_count: int) -> tuple[SavedStage, ...]:
    """As so many nodes would have saved it, each in a data folder of its own."""
    whole = dict(model.named_parameters())
    for number, layers in enumerate(StagePlan.even(model.architecture.layer_count, stage_count)):
        part = StageModel(model.architecture, layers)
        tensors = {f"model/{name}": whole[name].detach() for name, _ in part.named_parameters()}
        staging = StagingBuffers(TensorLayout.of(tensors))
        staging.copy_from(tensors)
        meta = CheckpointMeta(
            WalletId("ab" * 8),
            NodeId("node"),
            RunId("cd" * 32),
            model.architecture,
            layers,
            step=7,
            time=1e9,
            subspace_seed=SUBSPACE_SEED if model.architecture.subspace_rank else None,
        )
        place = folder / f"node-{number}" / "checkpoints" / meta.wallet_id / meta.run_id / f"layers-{number}"
        CheckpointStore(place).write(meta, staging)
    return choose(saved_stages(folder.glob("node-*/checkpoints/*/*/*"))).require_whole()


def greedy(model: StageModel, prompt: Sequence[int], count: int, never: Sequence[int]) -> list[int]:
    """The likeliest token, `count` times."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits: Tensor = model.logits(model(torch.tensor([ids])))[0, -1]
            logits[list(never)] = -torch.inf
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@contextmanager
def llama_cpp(library: ModuleType, file: Path) -> Iterator[httpx.Client]:
    """llama.cpp's own server on loopback, in float32 wherever it may choose."""
    parameters: Any = library.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = CONTEXT, 1, 0
    parameters.warmup = False
    parameters.cpuparams.n_threads = 1
    parameters.cache_type_k = parameters.cache_type_v = library.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = library.Server(parameters)
    try:
        with httpx.Client(base_url=server.listening_address, timeout=60, trust_env=False) as client:
            yield client
    finally:
        del server


needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed: pip install '.[export]'")
TABLE = learn_merges([topics.topics[name] for name in sorted(topics.topics)[:10]], 200)
PROMPT = "The value of the expression, 12 or so; it's\n\n  a list <|end_of_text|> \u4f60\u597d"
GROUPED = Architecture(
    hidden_size=64,
    layer_count=3,
    head_count=4,
    key_value_head_count=2,
    feed_forward_size=96,
    vocabulary_size=TABLE.next_merge_id,
    sequence_length=128,
)
ARCHITECTURES = {
    "grouped queries": GROUPED,
    "a head of keys for each of queries": replace(GROUPED, key_value_head_count=4, layer_count=2),
    "one head of keys, other constants": replace(
        GROUPED, key_value_head_count=1, rope_theta=500_000.0, norm_epsilon=1e-6
    ),
    "more rows than ids": replace(GROUPED, vocabulary_size=TABLE.next_merge_id + 37),
    "frozen scales": replace(GROUPED, trainable_rmsnorm=False),
    "norms per head": replace(GROUPED, qk_norm="head"),
    "frozen norms per head": replace(GROUPED, qk_norm="head", trainable_rmsnorm=False),
    "reordered, norms over the width": replace(GROUPED, norm_reorder=True, qk_norm="width"),
    "reordered, frozen norms over the width": replace(
        GROUPED, norm_reorder=True, qk_norm="width", trainable_rmsnorm=False
    ),
    "a subspace": replace(GROUPED, subspace_rank=16, free_blocks=1),
    "a subspace, reordered": replace(
        GROUPED, norm_reorder=True, qk_norm="width", trainable_rmsnorm=False, subspace_rank=24, free_blocks=2
    ),
}
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)


def never_drawn(architecture: Architecture) -> list[int]:
    return (~allowed_ids(TABLE.next_merge_id, architecture.vocabulary_size)).nonzero().flatten().tolist()


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed: pip install '.[export]'")
@each_architecture
def test_transformers_has_our_logits_and_our_ids(architecture: Architecture, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = made_model(architecture)
    export_huggingface(save_in_stages(model, tmp_path, architecture.layer_count), tmp_path / "model", TABLE)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = words(PROMPT)["input_ids"]
    assert ids == Tokenizer(TABLE).encode(PROMPT, bos=True).tolist()
    assert words.decode(ids, skip_special_tokens=True) == PROMPT
    tokens = torch.randint(0, architecture.vocabulary_size, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.logits(model(tokens))
        found = theirs(tokens).logits
        drawn = theirs.generate(torch.tensor([ids]), max_new_tokens=16, min_new_tokens=16, do_sample=False)
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() < 1e-4
    assert drawn[0, len(ids) :].tolist() == greedy(model, ids, 16, [*never_drawn(architecture), words.eos_token_id])


@needs_gguf
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp, which brings llama.cpp, is not installed")
@each_architecture
def test_llama_cpp_draws_our_tokens(architecture: Architecture, tmp_path: Path) -> None:
    import xllamacpp

    model = made_model(architecture)
    export_gguf(save_in_stages(model, tmp_path, 2), tmp_path / "model.gguf", TABLE)
    prompt = Tokenizer(TABLE).encode(PROMPT, bos=True).tolist()
    never = [*never_drawn(architecture), 2]
    with llama_cpp(xllamacpp, tmp_path / "model.gguf") as server:
        asked = server.post("/tokenize", json={"content": PROMPT, "add_special": True, "parse_special": False})
        assert asked.json()["tokens"] == prompt
        question = {"prompt": prompt, "n_predict": 24, "temperature": 0, "return_tokens": True, "n_probs": 1}
        answer = server.post("/completion", json={**question, "logit_bias": [[i, False] for i in never]}).json()
    expected = greedy(model, prompt, 24, never)
    assert answer["tokens"] == expected
    assert len(set(expected)) > 3
    first = answer["completion_probabilities"][0]  # it holds back those of tokens that are no whole character yet
    before = expected[: expected.index(first["id"])]
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([[*prompt, *before]])))[0, -1]
    assert first["logprob"] == pytest.approx(logits.log_softmax(0)[first["id"]].item(), abs=1e-3)


@needs_gguf
def test_the_file_describes_model_and_tokenizer(tmp_path: Path) -> None:
    import gguf

    architecture = ARCHITECTURES["more rows than ids"]
    export_gguf(save_in_stages(made_model(architecture), tmp_path, 1), tmp_path / "model.gguf", TABLE)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    facts = {name: field.contents() for name, field in reader.fields.items()}
    assert facts["general.architecture"] == "llama"
    assert facts["llama.attention.head_count_kv"] == 2
    assert facts["llama.context_length"] == 128
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == len(set(tokens)) == architecture.vocabulary_size
    assert kinds[:5] == [3, 3, 3, 2, 3]  # control, but for the unknown one
    assert set(kinds[FIRST_BYTE_ID : TABLE.next_merge_id]) == {1}
    assert set(kinds[TABLE.next_merge_id :]) == {5}
    assert facts["tokenizer.ggml.bos_token_id"] == BOS
    assert len(reader.tensors) == 9 * architecture.layer_count + 3
    assert sum(tensor.n_elements for tensor in reader.tensors) == sum(
        parameter.numel() for parameter in made_model(architecture).parameters()
    )


def normed(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    return scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


def titan_shapes(a: Architecture, version: str) -> dict[str, tuple[int, ...]]:
    """The parameters of a Llama as TorchTitan names them, with the norms that our options add."""
    parts, head = ("attention.", "output") if version == "0.2" else ("attention.qkv_linear.", "lm_head")
    keys, kind = a.key_value_head_count * a.head_size, a.qk_norm
    block: dict[str, tuple[int, ...]] = {
        f"{parts}wq.weight": (a.hidden_size, a.hidden_size),
        f"{parts}wk.weight": (keys, a.hidden_size),
        f"{parts}wv.weight": (keys, a.hidden_size),
        "attention.wo.weight": (a.hidden_size, a.hidden_size),
        "feed_forward.w1.weight": (a.feed_forward_size, a.hidden_size),
        "feed_forward.w2.weight": (a.hidden_size, a.feed_forward_size),
        "feed_forward.w3.weight": (a.feed_forward_size, a.hidden_size),
        "attention_norm.weight": (a.hidden_size,),
        "ffn_norm.weight": (a.hidden_size,),
    }
    if kind != "none":
        block["attention.q_norm.weight"] = (a.head_size if kind == "head" else a.hidden_size,)
        block["attention.k_norm.weight"] = (a.head_size if kind == "head" else keys,)
    layers = {f"layers.{i}.{name}": shape for i in range(a.layer_count) for name, shape in block.items()}
    rows = (a.vocabulary_size, a.hidden_size)
    return {"tok_embeddings.weight": rows, **layers, "norm.weight": (a.hidden_size,), f"{head}.weight": rows}


def rotated_in_pairs(x: Tensor, theta: float) -> Tensor:
    """RoPE of (batch, time, heads, size) on neighbouring pairs, as complex numbers."""
    _, time, _, size = x.shape
    angles = torch.outer(torch.arange(time), theta ** (-torch.arange(0, size, 2) / size))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(-2)


def titan_logits(weights: dict[str, Tensor], a: Architecture, tokens: Tensor) -> Tensor:
    """A plain Llama: separate matrices, rotary pairs of neighbours, explicit softmax."""
    batch, time = tokens.shape
    weights = {name.replace("qkv_linear.", "").replace("lm_head", "output"): one for name, one in weights.items()}
    hidden = weights["tok_embeddings.weight"][tokens]
    causal = torch.full((time, time), float("-inf")).triu(1)
    for i in range(a.layer_count):
        own = {name.removeprefix(f"layers.{i}."): one for name, one in weights.items() if f"layers.{i}." in name}

        def block_norm(x: Tensor, name: str, own: dict[str, Tensor] = own) -> Tensor:
            return normed(x, own[f"{name}.weight"], a.norm_epsilon)

        x = hidden if a.norm_reorder else block_norm(hidden, "attention_norm")
        q, k, v = (x @ own[f"attention.w{each}.weight"].t() for each in "qkv")
        if a.qk_norm == "width":
            q, k = block_norm(q, "attention.q_norm"), block_norm(k, "attention.k_norm")
        q, k, v = (each.view(batch, time, -1, a.head_size) for each in (q, k, v))
        if a.qk_norm == "head":
            q, k = block_norm(q, "attention.q_norm"), block_norm(k, "attention.k_norm")
        q, k = rotated_in_pairs(q, a.rope_theta), rotated_in_pairs(k, a.rope_theta)
        groups = a.head_count // a.key_value_head_count
        q, k, v = q.transpose(1, 2), *(each.repeat_interleave(groups, 2).transpose(1, 2) for each in (k, v))
        attention = torch.softmax(q @ k.transpose(2, 3) / a.head_size**0.5 + causal, -1) @ v
        out = attention.transpose(1, 2).flatten(2) @ own["attention.wo.weight"].t()
        hidden = hidden + (block_norm(out, "attention_norm") if a.norm_reorder else out)
        x = hidden if a.norm_reorder else block_norm(hidden, "ffn_norm")
        gate = torch.nn.functional.silu(x @ own["feed_forward.w1.weight"].t())
        out = (gate * (x @ own["feed_forward.w3.weight"].t())) @ own["feed_forward.w2.weight"].t()
        hidden = hidden + (block_norm(out, "ffn_norm") if a.norm_reorder else out)
    return normed(hidden, weights["norm.weight"], a.norm_epsilon) @ weights["output.weight"].t()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "architecture",
    [*ARCHITECTURES.values(), replace(GROUPED, norm_reorder=True, qk_norm="head"), replace(GROUPED, qk_norm="width")],
    ids=[*ARCHITECTURES, "reordered, norms per head", "norms over the width"],
)
def test_a_plain_llama_that_loads_the_distributed_checkpoint_has_our_logits(
    architecture: Architecture, tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as dcp

    model = made_model(architecture)
    folder = tmp_path / "model"
    export_dcp(save_in_stages(model, tmp_path, architecture.layer_count), folder)
    shapes = {version: titan_shapes(architecture, version) for version in ("0.2", "0.3")}
    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert listed.keys() == {name for each in shapes.values() for name in each}
    weights, earlier = ({name: torch.empty(shape) for name, shape in shapes[version].items()} for version in shapes)
    for each in (weights, earlier):
        dcp.load(each, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(*pair) for pair in zip(weights.values(), earlier.values(), strict=True))
    bytes_of_weights = sum(4 * weight.numel() for weight in weights.values())
    assert sum(file.stat().st_size for file in folder.glob("*.distcp")) < 1.1 * bytes_of_weights + 100_000  # once
    tokens = torch.randint(0, architecture.vocabulary_size, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.logits(model(tokens))
        found = titan_logits(weights, architecture, tokens)
    assert (found - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())
    if architecture.qk_norm == "none":  # the oracle sees the order of the rows
        halves = {
            name: one.view(-1, architecture.head_size // 2, 2, one.shape[1]).transpose(1, 2).reshape(one.shape)
            for name, one in weights.items()
            if name.endswith(("wq.weight", "wk.weight"))
        }
        with torch.no_grad():
            assert (titan_logits(weights | halves, architecture, tokens) - expected).abs().max() > 1e-2
    parameters = json.loads((folder / "params.json").read_text())
    assert parameters["n_kv_heads"] == architecture.key_value_head_count


def test_a_distributed_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    stages = save_in_stages(made_model(GROUPED), tmp_path, 2)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    with pytest.raises(StorageError, match="is not empty"):
        export_dcp(stages, taken)
    damaged = stages[1].tensor_file
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        export_dcp(stages, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("node")) == ["taken"]


@pytest.mark.skipif(sys.platform == "win32", reason="a process has no limit on the size of its files there")
@pytest.mark.parametrize("largest", [0, 100_000])
def test_a_full_disk_ends_a_distributed_checkpoint_with_a_sentence(tmp_path: Path, largest: int) -> None:
    import resource

    stages = save_in_stages(made_model(GROUPED), tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        with pytest.raises(StorageError, match="model cannot be written"):
            export_dcp(stages, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir() if "model" in path.name] == []


@pytest.mark.parametrize(("qk_norm", "reordered"), [("head", True), ("none", True), ("width", False)])
def test_models_without_a_ready_class_are_refused_with_the_reason(
    qk_norm: Literal["none", "head", "width"], reordered: bool, tmp_path: Path
) -> None:
    architecture = replace(GROUPED, qk_norm=qk_norm, norm_reorder=reordered)
    stages = save_in_stages(made_model(architecture), tmp_path, 2)
    reason = rf'norm_reorder = {str(reordered).lower()}, qk_norm = "{qk_norm}".*formats hf and gguf cannot'
    with pytest.raises(UsageError, match=reason) as caught:
        export_huggingface(stages, tmp_path / "model", TABLE)
    assert caught.value.action == "Use --format torch or --format dcp."
    if find_spec("gguf") is not None:
        with pytest.raises(UsageError, match=reason):
            export_gguf(stages, tmp_path / "model.gguf", TABLE)
    assert not list(tmp_path.glob("model*"))
    export_torch(stages, tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert weights["architecture"] == asdict(architecture)
    assert ("attention.norms.query.weight" in weights["layers"][2]) == (qk_norm != "none")


@pytest.mark.parametrize("stage_count", [1, 3])
def test_factors_are_multiplied_out(stage_count: int, tmp_path: Path) -> None:
    factored = replace(GROUPED, subspace_rank=16, free_blocks=1, norm_reorder=True, qk_norm="head")
    factored = replace(factored, trainable_rmsnorm=False)  # of these norms only the format torch is possible
    model = made_model(factored)
    stages = save_in_stages(model, tmp_path, stage_count)
    export_torch(stages, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    plain = StageModel(replace(factored, subspace_rank=0, free_blocks=0))
    tokens = torch.randint(0, factored.vocabulary_size, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            place, _, rest = name.removeprefix("layers.").partition(".")
            parameter.copy_(
                saved["layers"][int(place)].pop(rest) if place.isdigit() else saved["outside_layers"].pop(name)
            )
        expected = model.logits(model(tokens))
        assert (plain.logits(plain(tokens)) - expected).norm() <= 1e-5 * expected.norm()
    assert not any([*saved["layers"].values(), saved["outside_layers"]])  # nothing else was written


def test_a_state_with_factors_names_its_seed(tmp_path: Path) -> None:
    (stage,) = save_in_stages(made_model(ARCHITECTURES["a subspace"]), tmp_path, 1)
    assert stage.manifest.meta.subspace_seed == SUBSPACE_SEED
    (plain,) = save_in_stages(made_model(GROUPED), tmp_path / "plain", 1)
    assert plain.manifest.meta.subspace_seed is None
    assert b"subspace" not in encode_manifest(plain.manifest)
    nameless = replace(stage.manifest, meta=replace(stage.manifest.meta, subspace_seed=None))
    with pytest.raises(CheckpointError, match="does not name the seed"):
        export_huggingface([replace(stage, manifest=nameless)], tmp_path / "model", TABLE)


@needs_gguf
def test_nothing_is_overwritten_and_nothing_half_is_left(tmp_path: Path) -> None:
    stages = save_in_stages(made_model(GROUPED), tmp_path, 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.gguf").write_text("mine")
    with pytest.raises(StorageError, match="already exists"):
        export_gguf(stages, tmp_path / "out" / "model.gguf", TABLE)
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "out" / "model.gguf").rename(tmp_path / "out" / "model.Modelfile")
    with pytest.raises(StorageError, match="Modelfile already exists"):
        export_gguf(stages, tmp_path / "out" / "model.gguf", TABLE)


MESSAGES = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A {{ sequence }}."},
    {"role": "user", "content": "And\n\nthen? "},
]
SCRIPT = conversation_text((message["role"], message["content"]) for message in MESSAGES)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed: pip install '.[dev]'")
def test_transformers_makes_the_same_text_of_a_conversation(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    export_huggingface(save_in_stages(made_model(GROUPED), tmp_path, 1), tmp_path / "model", TABLE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == SCRIPT
    assert tokenizer(text)["input_ids"] == Tokenizer(TABLE).encode(SCRIPT, bos=True).tolist()


@needs_gguf
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp, which brings llama.cpp, is not installed")
def test_llama_cpp_makes_the_same_text_of_a_conversation(tmp_path: Path) -> None:
    import xllamacpp

    export_gguf(save_in_stages(made_model(GROUPED), tmp_path, 1), tmp_path / "model.gguf", TABLE)
    with llama_cpp(xllamacpp, tmp_path / "model.gguf") as server:
        answer = server.post("/apply-template", json={"messages": MESSAGES}).json()
    assert answer["prompt"] == SCRIPT


@needs_gguf
def test_a_card_and_a_modelfile_describe_the_model(tmp_path: Path) -> None:
    stages = save_in_stages(made_model(GROUPED), tmp_path, 2)
    export_gguf(stages, tmp_path / "out" / "model.gguf", TABLE)
    export_huggingface(stages, tmp_path / "folder", TABLE)
    modelfile = (tmp_path / "out" / "model.Modelfile").read_text()
    assert modelfile.startswith('FROM ./model.gguf\nTEMPLATE """{{ range .Messages }}')
    assert 'PARAMETER stop "\\nUser:"\n' in modelfile
    for card, library in ((tmp_path / "out" / "model.md", "gguf"), (tmp_path / "folder" / "README.md", "transformers")):
        text = card.read_text()
        _, front, body = text.split("---\n", 2)
        assert yaml.safe_load(front)["library_name"] == library
        assert stages[0].run_id in body
        assert "| Context | 128 tokens |" in body
        assert "System: Answer in one sentence.\nUser: What is a list?\nAssistant:\n" in body


@needs_gguf
def test_what_came_while_it_was_written_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    stages, path = save_in_stages(made_model(GROUPED), tmp_path, 1), tmp_path / "out" / "model.gguf"
    close = gguf.GGUFWriter.close

    def another_comes(writer: gguf.GGUFWriter) -> None:
        close(writer)
        path.write_text("mine")

    monkeypatch.setattr(gguf.GGUFWriter, "close", another_comes)
    with pytest.raises(StorageError, match="already exists"):
        export_gguf(stages, path, TABLE)
    assert [path.read_text() for path in path.parent.iterdir()] == ["mine"]


@needs_gguf
def test_the_file_is_flushed_by_a_handle_that_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows flushes no other; elsewhere it makes no difference, so the handle itself is looked at."""
    fsync, flushed = os.fsync, list[int]()

    def strict(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            flushed.append(os.write(descriptor, b""))  # raises for one that only reads
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", strict)
    export_gguf(save_in_stages(made_model(GROUPED), tmp_path, 1), tmp_path / "model.gguf", TABLE)
    assert flushed


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # as an import of what is not installed
    with pytest.raises(UsageError, match=r"pip install 'neuroshard\[export\]'"):
        require_gguf()


def test_without_a_tokenizer_the_folder_has_none(tmp_path: Path) -> None:
    export_huggingface(save_in_stages(made_model(GROUPED), tmp_path, 1), tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    drawing = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert drawing["suppress_tokens"] == [0, 1, *range(3, 10)]
