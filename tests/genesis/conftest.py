from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worlds.file_servers import StoreServer, set_credentials


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """An object store with one bucket, and credentials for it."""
    set_credentials(monkeypatch)
    running = StoreServer()
    yield running
    running.close()
