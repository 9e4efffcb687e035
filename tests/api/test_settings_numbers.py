"""Numbers that no setting can have, sent to the node: one sentence each, and nothing changes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from neuroshard.config.setting_forms import InputKind, control_of
from neuroshard.config.settings import Settings
from tests.worlds.api import SECRET, ServedNode
from tests.worlds.statuses import training_status

NUMBERS = [key for key in Settings.model_fields if control_of(key).kind is InputKind.NUMBER]
DIGITS = "9" * 1_000
IMPOSSIBLE = ["1e99", "-1", "NaN", "Infinity", "true", "[]", DIGITS, f"-{DIGITS}", f"0.{DIGITS}e999"]
TYPED = ["1e99", "-1", "NaN", "inf", "", " ", DIGITS, f"-{DIGITS}", "1 000 000", "0x10", "<b>1</b>"]


@pytest.fixture(scope="module")
def node() -> Iterator[httpx.Client]:
    """One client for all calls: each new one would read all roots of TLS."""
    served = ServedNode(training_status())
    served.start()
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
    with httpx.Client(base_url=served.url, headers=headers) as client:
        yield client
    served.stop()


def called(node: httpx.Client, method: str, content: str | None = None) -> httpx.Response:
    return node.request(method, "api/config", content=content)


@pytest.mark.parametrize("value", [*IMPOSSIBLE, *(f'"{text}"' for text in TYPED)], ids=lambda value: value[:12])
def test_a_number_that_no_setting_can_have_is_refused_with_one_sentence(node: httpx.Client, value: str) -> None:
    before = called(node, "GET").text
    for key in NUMBERS:
        answer = called(node, "PATCH", f'{{"{key}": {value}, "training": false}}')
        assert answer.status_code in {400, 422}, (key, answer.text)
        detail = answer.json()["detail"]
        assert detail.count(". ") == 0, detail
        assert detail.endswith("."), detail
        assert len(detail) < 400, detail
        if answer.status_code == 422:
            assert detail.startswith(f"{key} cannot be "), detail
            assert "config.toml" not in detail  # it is the value of the request, not that of the file
    assert called(node, "GET").text == before


def test_the_whole_range_and_no_value_are_accepted(node: httpx.Client) -> None:
    """The test above could otherwise pass at a node that refuses everything."""
    for key in NUMBERS:
        control = control_of(key)
        for number in (control.maximum, None):
            value = "null" if number is None else f"{number:.0f}"
            answer = called(node, "PATCH", f'{{"{key}": {value}}}')
            assert answer.status_code == 202, (key, answer.text)
