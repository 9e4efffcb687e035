"""Schema fuzzing of the wizard's routes: whatever is sent, the answer is one of those that its document names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from neuroshard.api.server import ApiServer, bind
from tests.worlds.setup_api import SECRET, SetupApi

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations inside the library are not ours
    import schemathesis
    from schemathesis import GenerationMode

CONFIGURATION = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = ("invitation", "purpose", "folders", "demo", "wallet", "backup", "choices", "finish")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SetupApi, str]]:
    """One running wizard and its address."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    wizard = SetupApi(tmp_path_factory.mktemp("fuzz") / "node", port=port)
    server = ApiServer(wizard.app, listener)
    server.start()
    yield wizard, f"http://127.0.0.1:{port}"
    server.stop()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_wizard_keeps_to_its_schema(served: tuple[SetupApi, str], name: str, mode: GenerationMode) -> None:
    wizard, url = served
    operation: Any = schemathesis.openapi.from_dict(wizard.app.openapi())[f"/api/setup/{name}"]["post"]

    @CONFIGURATION
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call(base_url=url, headers={"Authorization": f"Bearer {SECRET}"})
        assert response.status_code < 500, response.text
        operation.validate_response(response)

    check()
    assert not Path(wizard.folder).exists()
