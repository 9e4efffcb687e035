"""A setting shows the value that the node uses, wherever that is another one than its own."""

from __future__ import annotations

from dataclasses import replace

from neuroshard.api.settings_view import settings_view, values_in_use
from neuroshard.config.loading import load_settings
from neuroshard.status.data import DataStatus
from neuroshard.status.snapshot import DilocoStatus, NetworkState, NetworkStatus, NodeStatus
from tests.worlds.statuses import training_status


def view_of(status: NodeStatus, **flags: object) -> dict[str, dict[str, object]]:
    described = load_settings({"data_dir": "/data", **flags}, {}).describe()
    return settings_view(described, status)  # type: ignore[return-value]


def test_the_values_of_the_node_win_over_those_of_the_settings() -> None:
    network = NetworkStatus(NetworkState.ALONE, addresses=("/ip4/192.168.1.5/tcp/4001/p2p/x",))
    data = DataStatus("http://127.0.0.1:5000", verified=True, explanation="", total_shards=16)
    status = replace(training_status(), network=network, data=data, diloco=DilocoStatus(inner_steps_total=25))
    shown = view_of(status, inner_steps=100)
    assert shown["memory"]["in_use"] == 1_200
    assert shown["genesis"]["in_use"] == "http://127.0.0.1:5000"
    assert shown["inner_steps"]["in_use"] == 25
    assert shown["p2p_port"]["in_use"] == 4001
    assert shown["device"] == {**shown["device"], "value": "auto", "in_use": "cpu", "control": "text"}


def test_a_value_that_is_used_as_it_is_has_no_second_one() -> None:
    shown = view_of(training_status(), memory=1_200)
    assert "in_use" not in shown["memory"]
    assert "in_use" not in shown["max_storage"]
    assert set(values_in_use(training_status())) <= set(shown)
