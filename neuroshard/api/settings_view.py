"""The settings for a page: their values, the values that the node really uses, and their forms."""

from __future__ import annotations

from collections.abc import Mapping

from neuroshard.config.setting_forms import FORMS, control_of
from neuroshard.status.snapshot import NetworkState, NodeStatus
from neuroshard.types import JsonValue


def settings_view(described: JsonValue, status: NodeStatus) -> dict[str, JsonValue]:
    """Add to each described setting its form, and in `in_use` the value that the node uses if it is another one.

    A setting can differ from its effect: "measured" is a number of megabytes, the demo has its own data, and in a
    joined run the owner of the run decides on the steps between rounds.
    """
    used = values_in_use(status)
    return {
        key: {**setting, **_form_of(key), **_differing(key, setting, used)}
        if isinstance(setting, Mapping) and key in FORMS
        else setting
        for key, setting in (described.items() if isinstance(described, Mapping) else ())
    }


def values_in_use(status: NodeStatus) -> dict[str, JsonValue]:
    """The values of settings that the node uses now; those that its status does not show are left out."""
    used: dict[str, JsonValue] = {"device": status.resources.device}
    if status.resources.cpu_threads_limit > 0:
        used["cpu_threads"] = status.resources.cpu_threads_limit
    if status.memory is not None:
        used["memory"] = status.memory.limit_mb
    if status.data is not None and status.data.source:
        used["genesis"] = status.data.source
    if status.run is not None:
        used["run"] = status.run.run_id
    if status.diloco.inner_steps_total > 0:
        used["inner_steps"] = status.diloco.inner_steps_total
    if status.stages:
        used["max_stages"] = len(status.stages)
    if status.network.state is not NetworkState.STARTING:
        used["network"] = status.network.state is not NetworkState.OFF
    port = _port_of(status.network.addresses)
    if port is not None:
        used["p2p_port"] = port
    return used


def _port_of(addresses: tuple[str, ...]) -> int | None:
    """TCP port of the first multiaddr."""
    parts = addresses[0].split("/") if addresses else []
    number = parts[parts.index("tcp") + 1] if "tcp" in parts[:-1] else ""
    return int(number) if number.isdigit() else None


def _differing(key: str, setting: Mapping[str, JsonValue], used: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {"in_use": used[key]} if key in used and used[key] != setting.get("value") else {}


def _form_of(key: str) -> dict[str, JsonValue]:
    control, form = control_of(key), FORMS[key]
    return {
        "group": form.group,
        "title": form.title,
        "sentence": form.sentence,
        "unit": form.unit,
        "level": form.level.value,
        "unset": form.unset,
        "control": control.kind.value,
        "choices": list(control.choices),
        "minimum": control.minimum,
        "maximum": control.maximum,
        "is_whole": control.is_whole,
        "may_be_unset": control.may_be_unset,
    }
