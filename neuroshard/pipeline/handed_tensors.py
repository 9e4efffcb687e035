"""The tensors that neighbours hand to a stage, from their announcement by a driver until the stage has used them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field

import anyio

from neuroshard.pipeline.chain_protocol import Given
from neuroshard.pipeline.microbatch import (
    MicrobatchKey,
    NotHandedYetError,
    RefusedTensorError,
    StageBusyError,
    StageGoneError,
)
from neuroshard.pipeline.stage_protocol import INPUTS, WirePrecision
from neuroshard.types import NodeId

MOST_ANNOUNCED = 4096  # of all drivers; the oldest one is forgotten
MOST_ANNOUNCED_OF_DRIVER = 512
MOST_WAITING_SECONDS = 120.0  # of inputs; as long as an idle session of a driver


@dataclass
class _Announced:
    """A tensor that a driver has announced."""

    sender: NodeId
    precision: WirePrecision
    arrived: anyio.Event = field(default_factory=anyio.Event)
    given: Given | None = None  # decoded; None before it arrives and after it was used
    digest: str = ""  # of its bytes on the wire; "" before it arrives
    arrived_at: float = 0.0


class HandedTensors:
    """A bounded table by microbatch and name of the tensor. Only what a driver has announced is taken.

    Belongs to the event loop's thread.
    """

    def __init__(self, most_waiting: int, most_of_driver: int) -> None:
        """At most `most_waiting` inputs wait for room in the stage, and `most_of_driver` of one driver.

        Gradients are not counted: the caller takes one only for a microbatch that is open, and those are bounded.
        """
        self._most_waiting = most_waiting
        self._most_of_driver = most_of_driver
        self._announced: OrderedDict[tuple[MicrobatchKey, str], _Announced] = OrderedDict()

    def announce(self, key: MicrobatchKey, name: str, sender: NodeId, precision: WirePrecision) -> None:
        """Take this tensor from this sender. One that has come from it stays; one of another sender is dropped."""
        known = self._announced.get((key, name))
        if known is not None and (known.sender, known.precision) == (sender, precision):
            return
        if known is not None:
            known.sender, known.precision = sender, precision
            known.given, known.digest = None, ""  # waiting questions continue to wait
            if known.arrived.is_set():
                known.arrived = anyio.Event()
            return
        of_driver = [other for other in self._announced if other[0].driver == key.driver]
        if len(of_driver) >= MOST_ANNOUNCED_OF_DRIVER:
            del self._announced[of_driver[0]]
        elif len(self._announced) >= MOST_ANNOUNCED:
            self._announced.popitem(last=False)
        self._announced[key, name] = _Announced(sender, precision)

    def check(self, sender: NodeId, key: MicrobatchKey, name: str, precision: WirePrecision, digest: str) -> bool:
        """Whether a tensor with this digest is wanted; False: the stage has it, or has used one.

        A tensor that waits is replaced by another one of its sender, which had to compute it again. Raises
        StageBusyError if no driver has announced it yet or too many wait, StageGoneError for another sender, and
        RefusedTensorError for another precision.
        """
        known = self._announced.get((key, name))
        if known is None:
            raise StageBusyError("No driver has announced this tensor yet.")
        if known.sender != sender:
            raise StageGoneError("This tensor must come from the neighbour that the driver has named.")
        if known.precision is not precision:
            raise RefusedTensorError(f"The driver has named {known.precision.value}, not {precision.value}.")
        if known.digest:
            return known.given is not None and known.digest != digest
        self._drop_inputs(before=anyio.current_time() - MOST_WAITING_SECONDS)
        if name == INPUTS and self._is_full(key):
            raise StageBusyError("Too many tensors wait here for their microbatches.")
        return True

    def put(self, key: MicrobatchKey, name: str, given: Given, digest: str) -> None:
        """Keep a tensor that `check` wanted, unless it is not announced any more or was used meanwhile."""
        known = self._announced.get((key, name))
        if known is not None and (known.given is not None or not known.digest):
            known.given, known.digest, known.arrived_at = given, digest, anyio.current_time()
            known.arrived.set()

    async def wait_for(self, key: MicrobatchKey, name: str, seconds: float) -> tuple[Given, str]:
        """Wait for an announced tensor; the tensor and its digest. It stays until `forget`.

        Raises NotHandedYetError when it does not come in time, or was used before.
        """
        with anyio.move_on_after(seconds):
            while True:
                known = self._announced.get((key, name))
                if known is None or (known.given is None and known.digest):
                    break
                if known.given is not None:
                    return known.given, known.digest
                await known.arrived.wait()
        raise NotHandedYetError("The neighbour has not handed the tensor over yet.")

    def used(self, key: MicrobatchKey, name: str) -> None:
        """Free a tensor that the stage has used. Its digest stays, so that a repetition is recognised."""
        known = self._announced.get((key, name))
        if known is not None:
            known.given = None

    def close(self, driver: NodeId, session: int) -> None:
        """Forget the tensors of a session."""
        for place in [p for p in self._announced if (p[0].driver, p[0].session) == (driver, session)]:
            self._forget(place)

    def keep_only(self, drivers: Container[NodeId]) -> None:
        """Forget the tensors of all other drivers."""
        for place in [place for place in self._announced if place[0].driver not in drivers]:
            self._forget(place)

    def _forget(self, place: tuple[MicrobatchKey, str]) -> None:
        self._announced.pop(place).arrived.set()

    def _drop_inputs(self, before: float) -> None:
        """Drop inputs that have waited since before this time: no question comes for them any more."""
        waiting = self._waiting_inputs()
        for place in [place for place, one in waiting.items() if one.arrived_at < before]:
            self._forget(place)

    def _is_full(self, key: MicrobatchKey) -> bool:
        drivers = [place.driver for place, _ in self._waiting_inputs()]
        return len(drivers) >= self._most_waiting or drivers.count(key.driver) >= self._most_of_driver

    def _waiting_inputs(self) -> dict[tuple[MicrobatchKey, str], _Announced]:
        return {place: one for place, one in self._announced.items() if place[1] == INPUTS and one.given is not None}
