"""The owner's list of the wallets that may vote on an open run, as this computer stores it."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuroshard.consensus.committee import MAX_TRUSTED
from neuroshard.errors import UsageError
from neuroshard.identity import TokenSecret, Wallet
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.types import WalletId
from tests.node.test_founding import versions_of
from tests.worlds.nodes import OWNER

OFFER = versions_of("strangers").offer
STRANGER = Wallet.from_secret(TokenSecret("hex", b"s" * 32))


def wallets(count: int) -> list[WalletId]:
    return [WalletId(f"{number:032x}") for number in range(1, count + 1)]


def test_each_list_is_a_statement_with_the_next_number(tmp_path: Path) -> None:
    stored, (first, second) = StoredFoundations(tmp_path), wallets(2)
    assert stored.name_voter(OFFER, OWNER, first) == (first,)
    assert stored.name_voter(OFFER, OWNER, first) == (first,)
    assert stored.name_voter(OFFER, OWNER, second.upper()) == (first, second)
    assert stored.withdraw_voter(OFFER, OWNER, first) == first
    known = stored.read(OFFER)
    assert known.trusted == (second,)
    assert sorted(each.foundation.epoch for each in known.known.values()) == [0, 1, 2]
    assert known.word is not None
    assert known.word.foundation.epoch == 2


@pytest.mark.parametrize("name", ["", "1" * 31, "1" * 33, "g" * 32, "../" + "1" * 29, OWNER.wallet_id])
def test_a_name_that_is_no_other_wallet_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a wallet|without being named"):
        StoredFoundations(tmp_path).name_voter(OFFER, OWNER, name)


@pytest.mark.parametrize("name", ["", "0" * 8, "f" * 8, "0" * 31])
def test_a_name_is_taken_back_only_if_it_is_clear_which(name: str, tmp_path: Path) -> None:
    stored = StoredFoundations(tmp_path)
    for wallet in wallets(2):
        stored.name_voter(OFFER, OWNER, wallet)
    with pytest.raises(UsageError, match="named wallet"):
        stored.withdraw_voter(OFFER, OWNER, name)
    assert stored.read(OFFER).trusted == (*wallets(2),)


def test_only_the_owner_names_wallets_and_not_more_than_the_chain_takes(tmp_path: Path) -> None:
    stored = StoredFoundations(tmp_path)
    with pytest.raises(UsageError, match="Only the run's owner"):
        stored.name_voter(OFFER, STRANGER, "1" * 32)
    for wallet in wallets(MAX_TRUSTED):
        stored.name_voter(OFFER, OWNER, wallet)
    with pytest.raises(UsageError, match="at most 32 wallets"):
        stored.name_voter(OFFER, OWNER, "f" * 32)


def test_lists_of_two_computers_are_joined_by_the_next_command(tmp_path: Path) -> None:
    """Both were signed before either computer knew the other list. One applies, and the owner sees which."""
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    one, other = map(StoredFoundations, folders)
    first, second = wallets(2)
    one.name_voter(OFFER, OWNER, first)
    other.name_voter(OFFER, OWNER, second)
    one.write(OFFER, other.read(OFFER))
    assert one.read(OFFER).trusted in {(first,), (second,)}
    for wallet in (first, second):
        one.name_voter(OFFER, OWNER, wallet)
    assert set(one.read(OFFER).trusted) == {first, second}
    assert not one.read(OFFER).is_contradictory
    other.write(OFFER, one.read(OFFER))
    assert other.read(OFFER).current == one.read(OFFER).current
