"""Headers of requests about a stage: which stage of which run they mean, and strict reading of what strangers send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from neuroshard.identity.fields import exact_object
from neuroshard.network import RequestRefusedError
from neuroshard.swarm.claim_fields import layers_field, run_field
from neuroshard.types import JsonValue, LayerRange, RunId
from neuroshard.wire import Frame, WireValue

LARGEST_NUMBER = 10**15


@dataclass(frozen=True)
class StageName:
    """A stage of a run, as others name it."""

    run_id: RunId
    layers: LayerRange


def request_about(kind: str, stage: StageName, **fields: WireValue) -> Frame:
    """A request about a stage."""
    layers: WireValue = [stage.layers.start, stage.layers.stop]
    return Frame(kind, {"run": stage.run_id, "layers": layers, **fields})


def read_request_about(frame: Frame, *names: str) -> tuple[StageName, Mapping[str, JsonValue]]:
    """The stage of a request and its header, which has these further fields. Raises RequestRefusedError."""
    try:
        fields = read_header(frame, "run", "layers", *names)
        return StageName(run_field(fields["run"], "run"), _layers(fields["layers"])), fields
    except ValueError as error:
        raise RequestRefusedError(f"The request cannot be read: {error}.") from None


def read_header(frame: Frame, *names: str) -> Mapping[str, JsonValue]:
    """The header, which has exactly these fields. Raises ValueError that names the missing or unknown one."""
    return exact_object(cast("JsonValue", frame.header), set(names), "the header")


def _layers(value: JsonValue) -> LayerRange:
    layers = layers_field(value, "layers")
    if layers is None:
        raise ValueError("layers must be named")
    return layers
