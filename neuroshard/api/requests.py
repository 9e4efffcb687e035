"""Bodies of requests, and of the responses to commands, sessions and completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, RootModel

from neuroshard.api.rendering import EncodableText, RequestBody, ResponseBody

LONGEST_PAUSE_SECONDS = 7 * 86_400.0


class PauseRequest(RequestBody):
    """POST /api/training/pause. Without a duration the pause lasts until training is resumed."""

    duration_seconds: float | None = Field(default=None, gt=0, le=LONGEST_PAUSE_SECONDS)


class NoMembers(RequestBody):
    """Body of a call without parameters: `{}` or nothing."""


SettingName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[a-z0-9_.-]+$")]


class ConfigChanges(RootModel[Annotated[dict[SettingName, JsonValue], Field(min_length=1, max_length=64)]]):
    """PATCH /api/config: settings to change, by name."""


class CommandBody(ResponseBody):
    """202: the result of a command."""

    state: EncodableText = Field(description="state of the node afterwards")
    message: EncodableText
    details: dict[str, JsonValue] | None = None


class SessionRequest(RequestBody):
    """POST /api/session: a key that works once, from the page of `neuroshard open`, or the API secret."""

    secret: str = Field(min_length=1, max_length=200)


class SessionBody(ResponseBody):
    """The session of the dashboard, with the token that it needs to send commands."""

    csrf_token: str = Field(description="value of the X-NeuroShard-CSRF header")
    setup: bool = Field(description="true: the node waits to be set up; only the wizard's routes answer")


MOST_COMPLETION_TOKENS = 2_048
Prompt = Annotated[str, Field(max_length=200_000)]
StopSequence = Annotated[str, Field(min_length=1, max_length=200)]


class StreamOptions(RequestBody):
    """Options of a streamed completion."""

    include_usage: bool = False


class CompletionRequest(RequestBody):
    """POST /v1/completions. Unsupported members of OpenAI's API that would change the result are refused."""

    model: str = Field(default="neuroshard", max_length=200)
    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=1)]
    max_tokens: int = Field(default=16, ge=1, le=MOST_COMPLETION_TOKENS)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: StopSequence | Annotated[list[StopSequence], Field(max_length=4)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    logprobs: None = None
    suffix: None = None
    presence_penalty: float = Field(default=0, ge=0, le=0)
    frequency_penalty: float = Field(default=0, ge=0, le=0)
    user: str | None = Field(default=None, max_length=200)

    @property
    def prompt_text(self) -> str:
        """The single prompt, which the body may contain as a list."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]

    @property
    def stop_sequences(self) -> tuple[str, ...]:
        """The stop sequences, from none to four."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionChoice(ResponseBody):
    """One continuation, or a piece of it."""

    text: EncodableText
    index: int = 0
    logprobs: None = None
    finish_reason: str | None = Field(default=None, description='"stop" or "length"; null in all but the last piece')


class Usage(ResponseBody):
    """Counts in tokens of the model's own tokenizer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionBody(ResponseBody):
    """Response of POST /v1/completions, and of each streamed piece."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(ResponseBody):
    """One name of the model in training."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelsBody(ResponseBody):
    """GET /v1/models: the names of the model in training."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
