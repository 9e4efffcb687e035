"""Later versions of a run's parameters in the chain: who may sign one, and from which outer step it applies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from msgspec import structs

from neuroshard.config.run_parameters import RunParameters
from neuroshard.consensus.chain import Chain, Step
from neuroshard.consensus.committee import (
    KEPT_VERSIONS,
    VERSION_STEPS,
    AppliedVersion,
    ChangeParameters,
    InvalidEntryError,
    change_of,
    versions_after,
    versions_from,
)
from neuroshard.consensus.entries import entries_objection, merged_evidence, next_change, supported_entries
from neuroshard.consensus.foundation import Founding, StageStart
from neuroshard.consensus.round_messages import (
    EntryEvidence,
    EvidenceSaid,
    MalformedMessageError,
    encode_round_message,
    read_round_message,
)
from neuroshard.consensus.stage_chain import InMemoryChainStore, StageChain, StoredChain
from neuroshard.errors import DataError
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet
from neuroshard.node.stage_versions import StageVersions
from neuroshard.types import RunId
from tests.consensus.test_chain import MEMBERS, founded, longer, signed, value_on
from tests.worlds.clock import at_once
from tests.worlds.stages import PARAMETERS

OWNER, STRANGER = (Wallet.from_secret(TokenSecret("hex", bytes([number] * 32))) for number in (1, 2))
FIRST = replace(PARAMETERS, genesis=replace(PARAMETERS.genesis, root="a" * 64, tokenizer_sha256="b" * 64))
INITIAL = SignedRunParameters.sign(OWNER, FIRST)


def version(number: int, holds_from: int = 0, rate: float = 0.5, *, signer: Wallet = OWNER) -> ChangeParameters:
    inner = replace(FIRST.inner, learning_rate=rate)
    changed = replace(FIRST, version=number, holds_from_outer_step=holds_from, inner=inner)
    return change_of(SignedRunParameters.sign(signer, changed))


def with_entry(chain: Chain, *entries: ChangeParameters) -> Chain:
    seats = [seat.member for seat in chain.ledger.committee.seats]
    return chain.extended(signed(value_on(chain, entries=entries), seats))


def owned(chain: Chain) -> Chain:
    """The chain of a run that belongs to the owner's wallet, before any value."""
    return replace(chain, owner=OWNER.wallet_id)


def step_of(chain: Chain) -> Step:
    place = chain.standing
    return Step(RunId("1" * 64), 0, place.outer_step, place.root or "0" * 64, "terms", place, chain.ledger, chain.owner)


def starts(chain: Chain) -> list[tuple[int, int]]:
    return [(each.number, each.start) for each in chain.ledger.versions]


async def stage_versions(chain: Chain) -> StageVersions:
    """The versions of a node that starts with this chain on its disk."""
    founding = Founding(chain.statement, chain.epoch, chain.start, chain.owner)
    store = InMemoryChainStore()
    store.write(StoredChain(chain.statement, chain.proof()))
    stage = StageChain(lambda: founding, store, at_once)
    await stage.load()
    return StageVersions(INITIAL, stage)


def test_a_version_applies_from_the_second_step_after_its_value_or_from_the_step_that_the_owner_named() -> None:
    chain = longer(founded(), 5)
    soon = with_entry(chain, version(2, holds_from=3))  # the value leads to outer step 6
    assert soon.standing.outer_step == 6
    assert starts(soon) == [(2, 6 + VERSION_STEPS)]
    later = with_entry(chain, version(2, holds_from=50))
    assert starts(later) == [(2, 50)]
    assert starts(longer(later, 3)) == [(2, 50)]


def test_a_version_that_would_never_apply_leaves_the_ledger() -> None:
    chain = with_entry(founded(), version(2, holds_from=50))
    assert starts(with_entry(chain, version(3, holds_from=40))) == [(3, 40)]
    assert starts(with_entry(chain, version(3, holds_from=50))) == [(3, 50)]
    assert starts(with_entry(chain, version(3, holds_from=60))) == [(2, 50), (3, 60)]


def test_of_two_versions_of_one_number_the_first_one_in_the_chain_applies() -> None:
    chain = with_entry(founded(), version(2, rate=0.25))
    with pytest.raises(InvalidEntryError, match="version 2 is not newer than version 2"):
        with_entry(chain, version(2, rate=0.75))
    assert next_change(step_of(chain), [version(2, rate=0.75), version(3)]) == version(3)


def test_the_ledger_keeps_the_newest_versions_only() -> None:
    kept: tuple[AppliedVersion, ...] = ()
    for number in range(2, KEPT_VERSIONS + 10):
        kept = versions_after(kept, [version(number, holds_from=10 * number)], 0)
    assert [each.number for each in kept] == [*range(10, KEPT_VERSIONS + 10)]


def test_only_the_owners_signature_is_evidence() -> None:
    chain, here = owned(founded()), {member.node_id for member in MEMBERS}
    good, foreign = version(2), version(2, signer=STRANGER)
    assert supported_entries(step_of(chain), EntryEvidence(version=good.signed), here) == (good,)
    assert supported_entries(step_of(chain), EntryEvidence(version=foreign.signed), here) == ()
    evidence = EntryEvidence(version=good.signed)
    assert entries_objection(step_of(chain), (good,), evidence, here) == ""
    assert "no evidence" in entries_objection(step_of(chain), (good,), EntryEvidence(), here)
    earlier = structs.replace(good, holds_from=7)  # the proposer changes the owner's outer step
    assert "no evidence" in entries_objection(step_of(chain), (earlier,), evidence, here)


def test_of_several_versions_the_first_one_that_the_chain_lacks_enters_first() -> None:
    chain = owned(founded())
    second, third = (EntryEvidence(version=version(number, holds_from=10 * number).signed) for number in (2, 3))
    for one, other in ((second, third), (third, second)):
        assert merged_evidence(step_of(chain), one, other) == second
    after = replace(chain, ledger=structs.replace(chain.ledger, versions=(AppliedVersion(2, 20, b""),)))
    assert merged_evidence(step_of(after), second, third) == third


def test_evidence_with_a_changed_byte_is_refused() -> None:
    said = EvidenceSaid(EntryEvidence(version=version(2).signed))
    (data,) = encode_round_message(said)
    assert read_round_message([data]) == said
    with pytest.raises(MalformedMessageError, match="in `version`"):
        read_round_message([bytes(data).replace(b'"learning_rate":0.5', b'"learning_rate":0.6')])
    with pytest.raises(ValueError, match="or it is the first"):
        EntryEvidence(version=INITIAL.to_json())


def test_parameters_that_fit_no_entry_are_refused() -> None:
    seeds = tuple(f"/dns4/{'a' * 60}.{number}.example/tcp/1/p2p/{'x' * 400}" for number in range(16))
    large = SignedRunParameters(replace(FIRST, version=2, seeds=seeds), OWNER.public_key, bytes(64))
    with pytest.raises(DataError, match="more than 8,192"):
        change_of(large)


def parameters(chain: Chain, *outer_steps: int) -> list[RunParameters]:
    versions = trio.run(stage_versions, chain)
    return [versions.at(step) for step in outer_steps]


def test_a_restarted_node_reads_every_version_from_its_chain() -> None:
    chain = owned(founded())
    chain = with_entry(longer(chain, 2), version(2, rate=0.25))  # the value leads to outer step 3
    chain = longer(with_entry(chain, version(3, holds_from=9, rate=0.125)), 2)
    rates = [each.inner.learning_rate for each in parameters(chain, 0, 4, 5, 8, 9, 1000)]
    first = FIRST.inner.learning_rate
    assert rates == [first, first, 0.25, 0.25, 0.125, 0.125]


def test_a_certified_version_that_changes_a_fixed_field_is_ignored_by_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = SignedRunParameters.sign(OWNER, replace(FIRST, version=3, batch_size=FIRST.batch_size + 1))
    chain = with_entry(with_entry(owned(founded()), version(2, rate=0.25)), change_of(wrong))
    (held,) = parameters(chain, 100)
    assert held.version == 2
    assert "Version 3 of the run is ignored" in caplog.text


def test_a_new_foundation_carries_the_versions_over_that_apply_there_or_later() -> None:
    chain = longer(with_entry(with_entry(founded(), version(2)), version(3, holds_from=40)), 10)
    kept = versions_from(chain.ledger.versions, chain.standing.outer_step)
    assert kept == chain.ledger.versions
    assert [each.number for each in versions_from(kept, 40)] == [3]
    start = StageStart(0, chain.ledger.committee, chain.standing.height, 12, "1" * 64, chain.standing.value, kept)
    again = Chain.founded(Founding("e" * 64, 1, start, chain.owner))
    assert starts(again) == starts(chain)
