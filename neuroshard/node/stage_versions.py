"""The parameters of a run at each outer step of one stage, as the stage's chain decides them.

A version that the owner has signed applies from the outer step that its entry in the chain leads to. All members of the
stage follow the same chain, so they change at the same outer step, whenever they heard of the version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from neuroshard.config.run_parameters import RunParameters
from neuroshard.consensus.committee import AppliedVersion
from neuroshard.consensus.stage_chain import StageChain
from neuroshard.errors import DataError
from neuroshard.identity import SignedRunParameters
from neuroshard.runs.offer import changed_fields, check_succession

_LOG = logging.getLogger(__name__)
_NOT_WORTH_A_WORD = {"version", "holds_from_outer_step"}


class StageVersions:
    """Belongs to the event loop. The trainer reads the parameters at every step."""

    def __init__(self, initial: SignedRunParameters, chain: StageChain) -> None:
        self._initial = initial
        self._chain = chain
        self._read = dict[bytes, RunParameters | None]()  # by signed version; None: the owner may not sign it
        self._seen = -1  # the latest outer step at which somebody looked
        self._holding: RunParameters | None = None  # parameters at that step

    def at(self, outer_step: int) -> RunParameters:
        """Parameters for the inner steps after `outer_step` outer steps, and for the round that ends those steps."""
        found = self._initial.parameters
        for version in self._chain.versions:
            if version.start <= outer_step:
                found = self._parameters_of(version) or found
        if outer_step > self._seen:
            self._note(outer_step, found)
        return found

    def _parameters_of(self, version: AppliedVersion) -> RunParameters | None:
        if version.signed not in self._read:
            self._read[version.signed] = _checked(self._initial, version)
        return self._read[version.signed]

    def _note(self, outer_step: int, holding: RunParameters) -> None:
        before, self._holding, self._seen = self._holding, holding, outer_step
        if before is not None and before is not holding:
            names = [name for name in changed_fields(before, holding) if name not in _NOT_WORTH_A_WORD]
            what = ", ".join(names) or "nothing"
            _LOG.info(
                "Outer step %d: version %d of the run applies now; it changes %s.", outer_step, holding.version, what
            )


def first_step_of(number: int, chains: Sequence[Sequence[AppliedVersion]]) -> int | None:
    """The outer step from which all stages apply a version of the run, by the certified versions of their chains.

    None: the chain of a stage does not have it yet.
    """
    if number == 1:
        return 0
    starts = [each.start for versions in chains for each in versions if each.number == number]
    return max(starts) if starts and len(starts) == len(chains) else None


def applied_parameters(
    initial: SignedRunParameters, versions: Iterable[AppliedVersion], outer_step: int
) -> RunParameters:
    """The parameters that these certified versions lead to at an outer step."""
    found = initial.parameters
    for version in versions:
        if version.start <= outer_step:
            found = _checked(initial, version) or found
    return found


def _checked(initial: SignedRunParameters, version: AppliedVersion) -> RunParameters | None:
    """The parameters of a certified version. All nodes ignore one that changes what no version may change."""
    try:
        signed = SignedRunParameters.from_json(version.signed)
        check_succession(initial, signed)
    except DataError as error:
        _LOG.error("Version %d of the run is ignored: %s", version.number, error)
        return None
    return signed.parameters
