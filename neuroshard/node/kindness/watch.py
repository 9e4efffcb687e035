"""The task that lives beside the training: looks at this computer every second, decides, and has it obeyed."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Protocol

import anyio

from neuroshard.config.settings import Settings
from neuroshard.node.configuration import Configuration
from neuroshard.node.kindness.network_rules import NetworkRules
from neuroshard.node.kindness.policy import Observed, Rules, UserPause, decide, next_gpu_share
from neuroshard.node.kindness.readings import readings
from neuroshard.node.kindness.sensing.lookout import Lookout
from neuroshard.node.publisher import Publisher
from neuroshard.pipeline.control import RequestedPause
from neuroshard.status.owner_policy import USER, NetworkDecision, OwnerPolicyStatus, TrainingDecision

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class Obedient(Protocol):
    """Does what was decided: a CommandLoop."""

    @property
    def gpu_uuid(self) -> str | None:
        """Of the accelerator that trains."""
        ...

    def obey(self, decision: TrainingDecision) -> None:
        """From now on."""
        ...

    async def until_commanded(self) -> None:
        """Wait until the decision may be another one."""
        ...


class KindnessWatch:
    """Used once a start."""

    def __init__(
        self,
        configuration: Configuration,
        wish: RequestedPause,
        loop: Obedient,
        publisher: Publisher,
        *,
        network: NetworkRules | None = None,
        observe: Callable[[Rules, str | None], Awaitable[Observed]] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`observe` looks at this computer for what the rules ask, and at the accelerator of that id."""
        self._configuration = configuration
        self._wish = wish
        self._loop = loop
        self._publisher = publisher
        self._network = network
        self._lookout = Lookout()
        self._observe = observe or self._lookout.look
        self._wall_clock = wall_clock
        self._rules: tuple[Settings, Rules] | None = None
        self._gpu_share = 1.0
        self._told: OwnerPolicyStatus | None = None

    async def run(self) -> None:
        """Look, decide and have it obeyed until cancelled."""
        try:
            while True:
                await self.look()
                with anyio.move_on_after(LOOK_SECONDS):
                    await self._loop.until_commanded()
        finally:
            self._lookout.close()
            if self._network is not None:
                with anyio.CancelScope(shield=True):
                    await self._network.save()

    async def look(self) -> None:
        """Once."""
        rules = self._present_rules()
        observed = await self._observe(rules, self._loop.gpu_uuid)
        asked = None if self._wish.seconds_left == 0.0 else self._wish.asked
        user = None if asked is None else UserPause(asked.reason, asked.until)
        self._gpu_share = next_gpu_share(self._gpu_share, rules, observed.gpu)
        local = datetime.fromtimestamp(self._wall_clock()).astimezone().replace(tzinfo=None)
        decision = decide(rules, observed, None, local, self._gpu_share)
        self._loop.obey(decision)
        told = decision if user is None else decide(rules, observed, user, local)
        network, moved = NetworkDecision(), 0
        if self._network is not None:
            network, moved = await self._network.look(rules, local)
        self._tell(OwnerPolicyStatus(told, readings(observed), network, moved // 1_000_000))

    def _present_rules(self) -> Rules:
        settings = self._configuration.settings
        if self._rules is None or self._rules[0] is not settings:
            self._rules = settings, Rules.of(settings)
        return self._rules[1]

    def _tell(self, status: OwnerPolicyStatus) -> None:
        if status == self._told:
            return
        decision, before = status.decision, self._told and self._told.decision
        is_new = before is None or (before.action, before.rule) != (decision.action, decision.rule)
        if is_new and decision.rule != USER and (before is not None or decision.rule):
            log.info("%s", decision.reason)
        self._told = status
        self._publisher.change(kindness=status)
