"""Schema fuzzing: what the OpenAPI document allows or forbids is answered as it says, never with a 500."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from neuroshard.api.server import ApiServer, bind
from tests.worlds.api import Api, FakeNode, make_api
from tests.worlds.statuses import among

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations inside the library are not ours
    import schemathesis
    from schemathesis import GenerationMode

EXAMPLES = 20
LASTING = {"/api/events"}  # answers forever
OPERATIONS = [
    (method, path)
    for path, methods in make_api(FakeNode()).app.openapi()["paths"].items()
    for method in methods
    if path not in LASTING
]
CONFIGURATION = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def served() -> Iterator[Api]:
    """One running server for all operations."""
    listener = bind("127.0.0.1", 0)
    with FakeNode() as node:
        api = make_api(node, port=listener.getsockname()[1])
        server = ApiServer(api.app, listener)
        server.start()
        yield api
        server.stop()


@pytest.fixture(scope="module")
def schema(served: Api) -> Any:
    """Its document as the fuzzer reads it."""
    return schemathesis.openapi.from_dict(served.app.openapi())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_operations_keep_to_their_schema(
    served: Api, schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    operation = schema[path][method]
    takes_something = operation.query or operation.body or operation.headers
    if mode is GenerationMode.NEGATIVE and not takes_something:
        pytest.skip("the operation takes nothing that could be wrong")

    @CONFIGURATION
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        served.node.board.publish(among(3))  # whatever the last call did
        response = case.call(base_url=served.base_url, headers=served.secret)
        assert response.status_code < 500, response.text
        assert response.headers["x-content-type-options"] == ["nosniff"]
        if response.status_code >= 400:
            assert response.headers["content-type"] == ["application/problem+json"], response.text
            assert response.json()["status"] == response.status_code
        operation.validate_response(response)

    check()
