"""Lets the model in training write short samples, so that people can read how it improves."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

import anyio
import anyio.to_thread

from neuroshard.config.state_file import StateFile
from neuroshard.errors import NotReadyError, StorageError
from neuroshard.network.blocking import BlockingRunner
from neuroshard.status.board import Generate, GeneratedText, GenerationSummary, Publisher
from neuroshard.status.history import SamplesStatus, TextSample
from neuroshard.training.text_generation import (
    MOST_CHARACTERS,
    MOST_TOKENS,
    StoredSamples,
    is_due,
    next_mark,
)
from neuroshard.training.trainer import Trainer
from neuroshard.types import RunId
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)

FOLDER = "samples"
MOST_BYTES = 1_000_000
LOOK_SECONDS = 1.0
RETRY_SECONDS = 60.0  # after a failed or interrupted sample
PARTIAL = (
    "This computer holds only a part of the model, and a text would have to pass through other computers: "
    "no samples are written here. You can still send a prompt to the model yourself."
)


@dataclass(frozen=True)
class SampleSource:
    """State of the trainer that decides whether a sample is written now."""

    steps: int
    may_write: bool  # not paused, and not about to be
    trained_seconds: float  # duration of all steps, at the present speed


@dataclass(frozen=True)
class SampleWriter:
    """Access to the model in training: its state, and the generation of a text."""

    look: Callable[[], SampleSource]
    generate: Callable[[Generate], Awaitable[GenerationSummary]]


def sample_writer_of(trainer: Trainer, *, is_whole: bool) -> SampleWriter | None:
    """Give access to a trainer's model; None if this node does not hold the whole model."""

    def look() -> SampleSource:
        if trainer.is_pause_wanted:
            return SampleSource(trainer.steps, may_write=False, trained_seconds=0.0)
        training = trainer.snapshot().training
        return SampleSource(training.steps, may_write=True, trained_seconds=training.steps * training.step_seconds)

    return SampleWriter(look, trainer.generate) if is_whole else None


class SampleTexts:
    """Writes and stores the samples of one run. A node with a part of the model only explains why it writes none."""

    def __init__(
        self,
        data_dir: Path,
        run_id: RunId,
        publisher: Publisher,
        author: SampleWriter | None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        offload: BlockingRunner = anyio.to_thread.run_sync,
    ) -> None:
        """`author` is None without the whole model; `clock` returns seconds since the epoch."""
        self._file = StateFile(
            data_dir / FOLDER / f"{run_id}.json",
            StoredSamples,
            "ignore",
            "a new list of samples begins",
            max_bytes=MOST_BYTES,
            data_dir=data_dir,
        )
        self._publisher = publisher
        self._author = author
        self._clock = clock
        self._monotonic = monotonic
        self._offload = offload
        self._stored = self._read()

    async def run(self) -> None:
        """Write a sample whenever one is due, until cancelled; return at once without the whole model."""
        self._show()
        author = self._author
        while author is not None:
            look = author.look()
            if look.may_write and is_due(look.steps, self._stored.samples, look.trained_seconds):
                await anyio.sleep(0 if await self._write(author) else RETRY_SECONDS)
            await sleep_to_tick(LOOK_SECONDS)

    async def _write(self, author: SampleWriter) -> bool:
        """Write one sample; return whether it was added."""
        step, begun = author.look().steps, self._monotonic()
        try:
            texts = list[str]()
            for prompt in self._stored.prompts:
                if not author.look().may_write:
                    return False  # a pause must free the accelerator
                texts.append(await self._text(author, prompt))
        except (NotReadyError, ValueError) as error:  # ValueError: the weights are NaN
            _LOG.info("The model could not write a sample now: %s", error)
            return False
        last, seconds = author.look().steps, round(self._monotonic() - begun, 3)
        sample = TextSample(step, max(step, last), self._clock(), seconds, tuple(texts))
        self._stored = StoredSamples(self._stored.prompts, (*self._stored.samples, sample))
        self._show()
        await self._save()
        return True

    async def _text(self, author: SampleWriter, prompt: str) -> str:
        pieces = list[str]()

        def take(piece: GeneratedText) -> None:
            pieces.append(piece.text)

        cancelled = Event()
        request = Generate(prompt, MOST_TOKENS, 0.0, 1.0, (), 0, take, cancelled)
        try:
            await author.generate(request)
        finally:
            cancelled.set()
        return "".join(pieces)[:MOST_CHARACTERS]

    def _show(self) -> None:
        samples = self._stored.samples
        due = None if self._author is None else next_mark(samples[-1].last_step if samples else None)
        explanation = PARTIAL if self._author is None else ""
        self._publisher.change(samples=SamplesStatus(self._stored.prompts, samples, due, explanation))

    async def _save(self) -> None:
        try:
            await self._offload(partial(self._file.write, self._stored))
        except StorageError as error:
            _LOG.warning("The texts of the model cannot be saved: %s", error)

    def _read(self) -> StoredSamples:
        """Read the samples of earlier starts. A file that cannot be used stays until the next sample replaces it."""
        try:
            return self._file.read() or StoredSamples()
        except StorageError as error:
            _LOG.warning("%s A new list of samples begins.", error.message)
            return StoredSamples()
