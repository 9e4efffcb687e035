"""Bodies of the OpenAI-compatible routes below /v1, and the functions that make the response bodies.

A member that would change the result and is not supported here is refused, never ignored. Members that clients send
with their neutral value are accepted with this value only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from neuroshard.api.rendering import EncodableText, RequestBody, ResponseBody
from neuroshard.data.chat_template import STOPS, conversation_text
from neuroshard.status.board import Generate, GeneratedText, ScoredToken
from neuroshard.types import MOST_COMPLETION_TOKENS

MOST_PROMPTS = 128
MOST_ALTERNATIVES = 20
CHAT_TOKENS = 128  # length of a reply if the request names none

Prompt = Annotated[str, Field(max_length=1_000_000)]  # at most the size of a body: the node counts its tokens
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
StopSequence = Annotated[str, Field(min_length=1, max_length=200)]
Nothing: TypeAlias = Annotated[list[str], Field(max_length=0)] | Annotated[dict[str, str], Field(max_length=0)] | None
PromptInput: TypeAlias = str | tuple[int, ...]


class StreamOptions(RequestBody):
    """Options of a streamed completion."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class SamplingRequest(RequestBody):
    """Members that both kinds of completions share."""

    model: str = Field(default="neuroshard", max_length=200)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: StopSequence | Annotated[list[StopSequence], Field(max_length=4)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    presence_penalty: float = Field(default=0, ge=0, le=0)
    frequency_penalty: float = Field(default=0, ge=0, le=0)
    logit_bias: Nothing = None
    user: str | None = Field(default=None, max_length=200)

    @property
    def stop_sequences(self) -> tuple[str, ...]:
        """The stop sequences, from none to four."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: (
        Prompt
        | TokenIds
        | Annotated[list[Prompt], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    ) = Field(description="a text, a list of token ids, or a list of texts or of lists of token ids")
    max_tokens: int = Field(default=16, ge=0, le=MOST_COMPLETION_TOKENS)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)
    best_of: Literal[1] = 1
    suffix: None = None

    @property
    def prompts(self) -> list[PromptInput]:
        """All prompts of the request, one or more; token ids as tuples."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = tuple(item for item in self.prompt if isinstance(item, int))
        if ids:
            return [ids]
        return [item if isinstance(item, str) else tuple(item) for item in self.prompt if not isinstance(item, int)]

    def command(self, prompt: PromptInput, sink: Callable[[GeneratedText], None], cancelled: Event) -> Generate:
        """Make the node's command for one of the prompts."""
        return Generate(
            prompt,
            self.max_tokens,
            self.temperature,
            self.top_p,
            self.stop_sequences,
            self.seed,
            sink,
            cancelled,
            self.echo,
            self.logprobs,
        )


class TextPart(RequestBody):
    """A part of a message."""

    type: Literal["text"]
    text: Prompt


class ChatMessage(RequestBody):
    """One message of a conversation. The members without text are those of a reply that clients send back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Prompt | Annotated[list[TextPart], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing = None
    annotations: Nothing = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextFormat(RequestBody):
    """The only format of a reply."""

    type: Literal["text"]


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    # The size of a body limits their number. A conversation longer than the context has an error of its own.
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(default=None, ge=1, le=MOST_COMPLETION_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MOST_COMPLETION_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)
    response_format: TextFormat | None = None
    tools: Nothing = None
    store: Literal[False] | None = None
    metadata: Nothing = None

    @property
    def prompts(self) -> list[PromptInput]:
        """The conversation as one text, by the template in `neuroshard/data/chat_template.py`."""
        roles = {"developer": "system"}
        return [conversation_text((roles.get(message.role, message.role), message.text) for message in self.messages)]

    def command(self, prompt: PromptInput, sink: Callable[[GeneratedText], None], cancelled: Event) -> Generate:
        """Make the node's command for the conversation."""
        return Generate(
            prompt,
            self.max_completion_tokens or self.max_tokens or CHAT_TOKENS,
            self.temperature,
            self.top_p,
            (*STOPS, *self.stop_sequences),
            self.seed,
            sink,
            cancelled,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class Usage(ResponseBody):
    """Counts in tokens of the model's own tokenizer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(ResponseBody):
    """Scores of a completion's tokens, and with `echo` of the prompt's. All lists have the same length."""

    tokens: list[EncodableText]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(ResponseBody):
    """One continuation, or a piece of it."""

    text: EncodableText
    index: int = Field(default=0, description="number of the prompt in the request")
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = Field(default=None, description='"stop" or "length"; null in all but the last piece')


class CompletionBody(ResponseBody):
    """Response of POST /v1/completions, and of each streamed piece."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class LikelyToken(ResponseBody):
    """A token with its probability."""

    token: EncodableText
    logprob: float | None
    bytes: list[int]


class ChatToken(LikelyToken):
    """A token of a reply, with the likeliest ones at its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(ResponseBody):
    """Scores of a reply's tokens."""

    content: list[ChatToken]


class ReplyMessage(ResponseBody):
    """A whole reply."""

    role: Literal["assistant"] = "assistant"
    content: EncodableText


class ReplyDelta(ResponseBody):
    """A piece of a reply. The first one names the role."""

    role: Literal["assistant"] | None = None
    content: EncodableText = ""


class ChatChoice(ResponseBody):
    """The reply: `message` in a whole body, `delta` in a streamed one."""

    index: int = 0
    message: ReplyMessage | None = None
    delta: ReplyDelta | None = None
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = Field(default=None, description='"stop" or "length"; null in all but the last piece')


class ChatBody(ResponseBody):
    """Response of POST /v1/chat/completions, and of each streamed piece."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ModelCard(ResponseBody):
    """One name of the model in training."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int = Field(description="tokens of the longest prompt")


class ModelsBody(ResponseBody):
    """GET /v1/models: the names of the model in training."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def completion_logprobs(scores: Sequence[ScoredToken], alternatives: int | None) -> CompletionLogprobs | None:
    """Scores in the form of /v1/completions; None if the request asks for none."""
    if alternatives is None:
        return None
    tops = [None if score.logprob is None else {text: value for text, _, value in score.top} for score in scores]
    return CompletionLogprobs(
        tokens=[score.text for score in scores],
        token_logprobs=[score.logprob for score in scores],
        top_logprobs=tops if alternatives else None,
        text_offset=[score.offset for score in scores],
    )


def chat_logprobs(scores: Sequence[ScoredToken], *, wanted: bool | None) -> ChatLogprobs | None:
    """Scores in the form of /v1/chat/completions; None if the request asks for none."""
    if not wanted:
        return None
    content = [
        ChatToken(
            token=score.text,
            logprob=score.logprob,
            bytes=list(score.content),
            top_logprobs=[LikelyToken(token=text, logprob=p, bytes=list(raw)) for text, raw, p in score.top],
        )
        for score in scores
    ]
    return ChatLogprobs(content=content)
