from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from s3_server import StoreServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """An object store with one bucket, and credentials for it."""
    import s3_server  # only for whom it is needed: it skips where moto is not installed

    s3_server.set_credentials(monkeypatch)
    running = s3_server.StoreServer()
    yield running
    running.close()
