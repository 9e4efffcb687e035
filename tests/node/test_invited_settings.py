"""What `--invite` accepts: a code of any length, a link, or a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.friends import LONG_AFTER_EVERY_TEST
from neuroshard.identity import TokenSecret, Wallet
from neuroshard.identity.invitations import (
    FILE_SUFFIX,
    InvitationError,
    InvitationTerms,
    InvitedPlaces,
    invite,
    to_code,
)
from neuroshard.runs.invited_settings import read_invitation_text
from neuroshard.types import RunId
from tests.worlds.claims import identity_of

NODES = [identity_of(number) for number in range(3)]
OWNER = Wallet.from_secret(TokenSecret("hex", bytes([7] * 32)))


def code_of(peers: int, label: str = "a") -> str:
    """A code that is longer with each peer."""
    places = InvitedPlaces("friends", tuple(f"/ip4/203.0.113.7/tcp/4001/p2p/{one.node_id}" for one in NODES[:peers]))
    terms = InvitationTerms(LONG_AFTER_EVERY_TEST, 1, label)
    return to_code(invite(OWNER, RunId("1" * 64), terms, places, seed=bytes(32)))


@pytest.mark.parametrize("peers", range(4))
@pytest.mark.parametrize("label", ["a", "a" * 40])
def test_a_bare_code_of_any_length_is_not_taken_for_a_file(peers: int, label: str) -> None:
    """A name of more than 255 characters is an error of the file system, not a missing file."""
    code = code_of(peers, label)
    assert len(code) > 255
    assert read_invitation_text(f" {code}\n").run_id == "1" * 64


def test_a_file_is_read_under_any_name(tmp_path: Path) -> None:
    for name in ("from-anna", f"friends{FILE_SUFFIX}"):
        (tmp_path / name).write_text(code_of(1))
        assert read_invitation_text(str(tmp_path / name)).run_id == "1" * 64


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / f"friends{FILE_SUFFIX}"
    with pytest.raises(InvitationError, match="cannot be read"):
        read_invitation_text(str(missing))


def test_a_file_that_a_desktop_passes_as_an_address_is_read(tmp_path: Path) -> None:
    file = tmp_path / "for Ada.neuroshard-invitation"
    file.write_text(code_of(1), "ascii")
    assert read_invitation_text(file.as_uri()).run_id == "1" * 64
