"""The names of a run's file that cut the model into stages: `num_stages`, and the layers of unequal stages."""

from __future__ import annotations

from collections.abc import Mapping

from neuroshard.config.run_parameters import MAX_UNEQUAL_STAGES
from neuroshard.errors import UsageError
from neuroshard.types import JsonValue

HEAD, BODY, TAIL = PARTS = ("num_hidden_layers_head", "num_hidden_layers_body", "num_hidden_layers_tail")
CUT_NAMES = frozenset({"num_stages", "stage_layers", *PARTS})  # together they say which stage has which layers
_EXAMPLE = f"For example: num_stages = 4, {HEAD} = 3, {BODY} = 4 and {TAIL} = 5."


def with_stage_layers(config: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Replace the layers of head, body and tail by `stage_layers`, one number for each stage.

    Raises UsageError that names the entries. Whether the layers add up to those of the model is checked later.
    """
    rest = {name: value for name, value in config.items() if name not in PARTS}
    named = [name for name in PARTS if name in config]
    layers = config.get("stage_layers")
    if not named:
        if isinstance(layers, list | tuple):
            rest.setdefault("num_stages", len(layers))
        return rest
    if layers is not None:
        raise UsageError(f"stage_layers and {named[0]} both say which stage has which layers.", "Name one of them.")
    stages = _number("num_stages", config.get("num_stages"), 2)
    if stages > MAX_UNEQUAL_STAGES:
        raise UsageError(
            f"num_stages = {stages} is more than the {MAX_UNEQUAL_STAGES} unequal stages that a run may have.",
            "Use fewer stages.",
        )
    head, tail = (_number(name, config.get(name), 1) for name in (HEAD, TAIL))
    bodies = stages - 2
    if bodies and _number(BODY, config.get(BODY), 0) == 0:
        raise UsageError(
            f"num_stages = {stages} leaves {bodies} stages between head and tail, but {BODY} = 0 gives them no layers.",
            _EXAMPLE,
        )
    body = [_number(BODY, config.get(BODY), 1)] * bodies if bodies else []
    return {**rest, "stage_layers": [head, *body, tail]}


def _number(name: str, value: JsonValue, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        given = "is missing" if value is None else f"= {value!r:.40} cannot be used"
        raise UsageError(f"{name} {given}: head, body and tail need a number of at least {least}.", _EXAMPLE)
    return value
