"""The versions of the run that this node serves: which holds when, and newer ones as they are heard of."""

from __future__ import annotations

import logging

from neuroshard.config.run_parameters import RunParameters
from neuroshard.runs.offer import OfferChoice, RunOffer, better_of, changed_fields

log = logging.getLogger(__name__)

_NOT_WORTH_A_WORD = {"version", "holds_from_outer_step"}


class RunVersions:
    """Read by the trainer at every step, so that a version takes force exactly with the outer step it names."""

    def __init__(self, offer: RunOffer) -> None:
        self.offer = offer
        self._told: RunParameters | None = None  # what held at the last look

    def at(self, outer_step: int) -> RunParameters:
        """The parameters that hold after this many outer steps."""
        return self.offer.parameters_at(outer_step)

    def learn(self, offer: RunOffer) -> OfferChoice:
        """Take over what a checked offer of the same run knows beyond what is known here."""
        choice = better_of(self.offer, offer)
        if choice.is_new:
            known = {signed.parameters.version for signed in self.offer.versions}
            for parameters in (signed.parameters for signed in choice.offer.versions):
                if parameters.version not in known:
                    start = parameters.holds_from_outer_step
                    log.info(
                        "The run's owner signed version %d; it holds from outer step %d.", parameters.version, start
                    )
            self.offer = choice.offer
        return choice

    def look(self, outer_step: int) -> None:
        """Tell the log when another version than at the last look holds."""
        holding = self.at(outer_step)
        before, self._told = self._told, holding
        if before is not None and before != holding:
            names = [name for name in changed_fields(before, holding) if name not in _NOT_WORTH_A_WORD]
            what = ", ".join(names) or "nothing"
            log.info("Outer step %d: version %d of the run holds; it changes %s.", outer_step, holding.version, what)
