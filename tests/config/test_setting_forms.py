"""Every setting has words for people and a control whose range is that of its type."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, sampled_from

from neuroshard.config.loading import check_settings
from neuroshard.config.setting_forms import FORMS, InputKind, control_of
from neuroshard.config.settings import Settings
from neuroshard.errors import UsageError

NUMBERS = [key for key in Settings.model_fields if control_of(key).kind is InputKind.NUMBER]


def accepts(key: str, value: object) -> bool:
    try:
        check_settings({key: value}, dict.fromkeys(Settings.model_fields, "flag"))
    except UsageError:
        return False
    return True


def test_every_setting_has_a_form_with_a_sentence() -> None:
    assert set(Settings.model_fields) <= set(FORMS)
    titles = [form.title for form in FORMS.values()]
    assert len(set(titles)) == len(titles)
    assert all(form.sentence.endswith(".") and form.title[0].isupper() for form in FORMS.values())


@given(sampled_from(NUMBERS), integers(-10, 2_000_000) | floats(-10, 2_000_000))
def test_a_number_is_accepted_exactly_within_the_range_that_a_page_shows(key: str, value: float) -> None:
    control = control_of(key)
    is_inside = (control.minimum is None or value >= control.minimum) and (
        control.maximum is None or value <= control.maximum
    )
    if control.is_whole and value != int(value):
        is_inside = False
    if value == control.minimum == 0 and key in {"max_upload", "monthly_quota"}:  # more than 0
        is_inside = False
    assert accepts(key, value) == is_inside


@pytest.mark.parametrize("value", ["1e99", 1e99, 10**99, "9" * 400, float("inf"), float("nan")])
@pytest.mark.parametrize("key", NUMBERS)
def test_no_number_is_beyond_every_calculation(key: str, value: object) -> None:
    assert not accepts(key, value)


@pytest.mark.parametrize("key", [key for key in Settings.model_fields if control_of(key).kind is InputKind.CHOICE])
def test_every_choice_is_accepted(key: str) -> None:
    choices = control_of(key).choices
    assert choices
    assert all(accepts(key, choice) for choice in choices)
    assert not accepts(key, "something else")


def test_only_the_owner_changes_what_leads_a_node_elsewhere() -> None:
    for key in ("token", "token_file", "genesis", "run", "peer", "host", "update_url", "data_dir"):
        assert control_of(key).kind is InputKind.NONE
