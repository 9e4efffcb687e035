"""The vector of a stage: order, digest, reuse of a buffer; and initial weights that do not depend on the machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema, flatten, initialise, load_vector
from neuroshard.types import Architecture, LayerRange

ARCHITECTURE = Architecture(32, 3, 4, 2, 48, 71, 16)
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "initial_weights.json").read_text())


def digests(model: StageModel) -> dict[str, str]:
    return {
        name: hashlib.sha256(p.detach().numpy().astype("<f4").tobytes()).hexdigest()
        for name, p in model.named_parameters()
    }


def make_model(seed: int, layers: LayerRange | None = None) -> StageModel:
    model = StageModel(ARCHITECTURE, layers)
    initialise(model, seed)
    return model


def test_a_vector_restores_every_bit() -> None:
    source, target = make_model(1), make_model(2)
    load_vector(target, flatten(source))
    assert digests(source) == digests(target)


def test_flatten_writes_into_the_given_buffer() -> None:
    model = make_model(1)
    buffer = torch.full((TensorSchema.of(model).total_size,), float("nan"))
    assert flatten(model, buffer) is buffer
    assert torch.equal(buffer, flatten(model))


def test_vectors_that_do_not_fit_are_refused() -> None:
    model = make_model(1)
    size = TensorSchema.of(model).total_size
    with pytest.raises(ValueError, match="schema needs"):
        load_vector(model, torch.zeros(size + 1))
    with pytest.raises(ValueError, match="schema needs"):
        flatten(model, torch.zeros(size - 1))
    with pytest.raises(ValueError, match="fp32"):
        flatten(model, torch.zeros(size, dtype=torch.float64))


def test_the_schema_covers_all_tensors_and_its_digest_sees_names_shapes_and_order() -> None:
    schema = TensorSchema.of(make_model(1))
    assert len(schema.names) == 6 * 3 + 3
    assert schema.total_size == sum(p.numel() for p in make_model(1).parameters())
    swapped = TensorSchema(schema.names[::-1], schema.shapes[::-1])
    other = TensorSchema(schema.names, ((71, 33), *schema.shapes[1:]))
    assert len({schema.sha256, swapped.sha256, other.sha256}) == 3
    assert schema.sha256 == TensorSchema.of(make_model(9)).sha256 == VECTORS["schema_sha256"]


def test_initial_weights_do_not_depend_on_the_split() -> None:
    whole = digests(make_model(5))
    parts = {**digests(make_model(5, LayerRange(0, 1))), **digests(make_model(5, LayerRange(1, 3)))}
    assert parts == whole


def test_initial_weights_do_not_depend_on_the_thread_count() -> None:
    before = torch.get_num_threads()
    one = digests(make_model(5))
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        assert digests(make_model(5)) == one
    finally:
        torch.set_num_threads(before)


def test_initial_weights_are_the_recorded_bytes() -> None:
    assert digests(make_model(VECTORS["seed"])) == VECTORS["sha256"]


def test_initial_weights_have_the_intended_spread_and_differ_by_tensor_and_seed() -> None:
    model = make_model(5)
    named = dict(model.named_parameters())
    assert named["layers.0.attention.query_key_value.weight"].std().item() == pytest.approx(32**-0.5, rel=0.05)
    assert named["layers.0.feed_forward.down.weight"].std().item() == pytest.approx((48 * 6) ** -0.5, rel=0.05)
    assert named["embedding.weight"].std().item() == pytest.approx(1.0, rel=0.05)
    assert named["head.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert all(bool((p == 1).all()) for name, p in named.items() if "norm" in name)
    matrices = [digest for name, digest in digests(model).items() if "norm" not in name]
    assert len(set(matrices)) == len(matrices)
    other = digests(make_model(6))
    assert all(other[name] != digest for name, digest in digests(model).items() if "norm" not in name)
