"""Folders that many tests read and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worlds.data_sets import TOKENS, TestSigner, write_genesis


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("genesis")
    write_genesis(folder, tokens=TOKENS, signer=TestSigner())
    return folder
