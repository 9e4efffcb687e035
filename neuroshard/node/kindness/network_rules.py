"""What the owner lets pass the network: nothing outside the schedule, nothing large when the quota is used up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

import anyio
import anyio.to_thread

from neuroshard.network.transfer_policy import TransferPolicy
from neuroshard.node.kindness.policy import Rules, clock_words
from neuroshard.node.kindness.transfer_ledger import TransferLedger
from neuroshard.node.networking import Networking
from neuroshard.status.owner_policy import NetworkAction, NetworkDecision

log = logging.getLogger(__name__)

SAVE_SECONDS = 5.0  # what a kill may leave uncounted
GIGABYTE = 1e9


def decide_network(rules: Rules, moved_bytes: int, local: datetime) -> NetworkDecision:
    """What may pass at this time of the owner's clock (without a time zone), after so many bytes this month. Pure."""
    if not rules.network_schedule.allows(local):
        change = rules.network_schedule.next_change(local)
        when = "" if change is None else f" until {clock_words(change, local)}"
        until = None if change is None else change.timestamp()
        reason = f"The network is off{when}: that is outside the network schedule."
        return NetworkDecision(NetworkAction.OFF, reason, "network_schedule", until)
    quota = rules.monthly_quota
    if quota is not None and moved_bytes >= quota * GIGABYTE:
        month = first_of_next_month(local)
        reason = f"The month's {quota:g} GB are used up: nothing large is sent or fetched until {month.day} {month:%B}."
        return NetworkDecision(NetworkAction.SMALL_ONLY, reason, "monthly_quota", month.timestamp())
    return NetworkDecision()


def first_of_next_month(local: datetime) -> datetime:
    """Its beginning."""
    later = local.replace(day=1, hour=0, minute=0, second=0, microsecond=0) + timedelta(days=32)
    return later.replace(day=1)


class NetworkRules:
    """Counts, decides and has it obeyed. Used by the task that looks at this computer every second."""

    def __init__(
        self, ledger: TransferLedger, gate: TransferPolicy, networking: Networking, moved: Callable[[], int]
    ) -> None:
        """`moved`: bytes since the start, in both directions."""
        self._ledger = ledger
        self._gate = gate
        self._networking = networking
        self._moved = moved
        self._saved_at = -SAVE_SECONDS
        self._decision = NetworkDecision()
        self._has_failed = False

    async def look(self, rules: Rules, local: datetime) -> tuple[NetworkDecision, int]:
        """What holds now, and the bytes of this month."""
        moved = self._ledger.note(self._moved(), f"{local:%Y-%m}")
        decision = decide_network(rules, moved, local)
        if decision != self._decision:
            self._obey(decision)
        now = anyio.current_time()
        if not self._ledger.is_saved and now - self._saved_at >= SAVE_SECONDS:
            self._saved_at = now
            await self.save()
        return decision, moved

    async def save(self) -> None:
        """Keep the count; a disk that does not take it is told once."""
        try:
            await anyio.to_thread.run_sync(self._ledger.save)
        except OSError as error:
            if not self._has_failed:
                log.warning("The bytes of this month cannot be stored: %s.", error.strerror or error)
            self._has_failed = True

    def _obey(self, decision: NetworkDecision) -> None:
        log.info("%s", decision.reason)
        self._decision = decision
        if decision.action is NetworkAction.OPEN:
            self._gate.open()
        else:
            self._gate.close(decision.reason)
        self._networking.forbid(decision.reason if decision.action is NetworkAction.OFF else "")
