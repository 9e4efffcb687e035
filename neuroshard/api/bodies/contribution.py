"""Answers about what this computer gave to training over time, and what the model wrote meanwhile."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from neuroshard.api.bodies.base import Answer, Number, Text

SpanName: TypeAlias = Literal["day", "week", "all"]


class WorkBody(Answer):
    """What was done in a stretch of time."""

    start: Number = Field(description="seconds since the epoch")
    tokens: int
    steps: int
    bytes_sent: int
    bytes_received: int
    training_seconds: Number
    loss: Number = Field(description="nats a token, mean over the tokens; null where none was told")


class ContributionBody(Answer):
    """GET /api/contribution: of every run that the data folder has served."""

    span: SpanName
    width_seconds: Number = Field(description="of each stretch; it doubles as all of time gets longer")
    points: list[WorkBody] = Field(description="oldest first; stretches without anything are left out")
    total: WorkBody | None = Field(description="since the beginning, whatever the span; null: nothing was done yet")


class SampleBody(Answer):
    """What the model wrote at one moment, always choosing the likeliest token."""

    step: int = Field(description="when it began to write")
    last_step: int = Field(description="when it had written everything: training goes on meanwhile")
    time: Number
    seconds: Number = Field(description="that the writing took")
    texts: list[Text] = Field(description="one for each prompt, without it")


class SamplesBody(Answer):
    """GET /api/samples: texts of the model in training at sparse steps of the run, oldest first."""

    prompts: list[Text]
    samples: list[SampleBody]
    next_step: int | None = Field(description="when the next one is due; null: none is")
    explanation: Text = Field(description="why none are written; empty where they are")
