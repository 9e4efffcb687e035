"""Text from the model in training: completions, their stop sequences, the stages' reading, and sample texts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Protocol

import anyio
import anyio.to_thread
import torch
from msgspec import Meta, Struct
from torch import Tensor

from neuroshard.data.tokenizer.encoder import Tokenizer
from neuroshard.data.tokenizer.table import EOS, FIRST_BYTE_ID
from neuroshard.errors import ContextLengthError, NotReadyError, UsageError
from neuroshard.model.transformer import sample_next
from neuroshard.pipeline.executor import ComputeThread, Priority
from neuroshard.pipeline.microbatch import Retry, SpoiltMicrobatchError, StageBusyError, StageError, UnreadTextError
from neuroshard.pipeline.routing import BlameRule, Routing
from neuroshard.pipeline.stage_client import StageClient
from neuroshard.pipeline.stage_protocol import run_off_loop
from neuroshard.pipeline.stage_texts import StageTexts, Text
from neuroshard.status.board import Generate, GeneratedText, GenerationSummary, ScoredToken
from neuroshard.status.history import TextSample
from neuroshard.types import Architecture, NodeId


class StopSequences:
    """Filter that ends a text at the first stop sequence, even one that spans several pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.reached = False

    def feed(self, piece: str) -> str:
        """Return the text that is certain to precede any stop sequence; "" once one was `reached`."""
        if self.reached:
            return ""
        text = self._held + piece
        found = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self.reached, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the held text if the answer ended without a stop sequence."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class Completion:
    """Text of one request, without a model: samples tokens and sends pieces to the sink. Not thread-safe.

    With `echo` and `logprobs` the prompt is scored first: the stages read it in parts, each part gives the logits of
    all its positions, and the first piece contains the whole prompt with its scores.
    """

    def __init__(self, architecture: Architecture, tokenizer: Tokenizer, request: Generate) -> None:
        """Raises ContextLengthError for a prompt that is too long, UsageError for ids that are not the tokenizer's."""
        self._request = request
        self._tokenizer = tokenizer
        self._context = architecture.sequence_length
        self._ids = prompt_ids(tokenizer, request.prompt, self._context)
        self._prompt_tokens = len(self._ids)
        self.position = 0  # number of tokens that the stages have read
        self._unread = list(self._ids)
        self._stops = StopSequences(request.stop)
        self._decoder = tokenizer.decoder()
        self._characters = 0  # length of the prompt and of the text so far, with the part that is not sent yet
        self._prompt_text, self._offsets = self._decode_prompt()
        self._sent = self._characters
        self._prompt_scores: list[ScoredToken] | None = None  # None: not scored, or already sent
        self._scores: list[ScoredToken] = []  # scores of tokens whose text is not sent yet
        self._allowed = allowed_ids(tokenizer.size, architecture.vocabulary_size)
        self._random = torch.Generator()
        if request.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(request.seed)
        self._count = 0
        self._finish_reason: str | None = None

    def begin(self) -> None:
        """Send an echo that needs no scores, or prepare for scoring the prompt."""
        if self._request.echo and self._request.logprobs is not None:
            self._prompt_scores = self._first_scores()
        elif self._request.echo:
            self._request.sink(GeneratedText(self._prompt_text, 0))

    @property
    def is_scoring_prompt(self) -> bool:
        """Whether the stages must return the logits of every position that they read."""
        return self._prompt_scores is not None

    @property
    def is_finished(self) -> bool:
        """Whether the last piece was sent."""
        return self._finish_reason is not None

    def unread(self, scored_at_once: int = 1) -> list[int]:
        """Tokens that the stages read next; at most `scored_at_once` while the prompt is scored."""
        if self.is_scoring_prompt:
            return self._ids[self.position : self.position + scored_at_once]
        return self._unread

    def summary(self) -> GenerationSummary:
        """Usage in tokens. The prompt's count includes the token that begins a text."""
        return GenerationSummary(self._prompt_tokens, self._count, self._finish_reason or "length")

    def cancel(self) -> None:
        """End the text now. The last piece reports the end."""
        if not self.is_finished:
            self._finish("stop")

    def wants_token(self) -> bool:
        """Whether logits are needed. A completion that was cancelled or is long enough ends here."""
        if self.is_finished:
            return False
        if self._request.cancelled.is_set():
            self.cancel()
        elif self._count >= self._request.max_tokens and not self.is_scoring_prompt:
            self._finish("length")
        return not self.is_finished

    def read_again(self) -> None:
        """Prepare for reading the text from its start again, or only its end if it is longer than the context."""
        self.position = 0
        self._unread = self._ids[-self._context :]
        if self.is_scoring_prompt:
            self._prompt_scores = self._first_scores()

    def take(self, logits: Tensor) -> None:
        """Sample a token from the logits (vocabulary,) and send the text that has become certain.

        While the prompt is scored, logits are (t, vocabulary), one row for each token of `unread`, and a token is
        sampled only after the last part. Raises ValueError for logits that are not finite.
        """
        if self.is_scoring_prompt:
            self._score_prompt(logits.reshape(-1, logits.shape[-1]))
            if self.is_scoring_prompt or self._request.max_tokens == 0:
                return
            logits = logits.reshape(-1, logits.shape[-1])[-1]
        token = self._sample(logits)
        if token == EOS:
            self._finish("stop")
            return
        piece = self._decoder.feed(token)
        if self._request.logprobs is not None:
            self._scores += self._scored(logits[None], [token], [self._characters])
        self._characters += len(piece)
        text = self._stops.feed(piece)
        if self._stops.reached:
            self._finish("stop", text)
        elif self._count >= self._request.max_tokens:
            self._finish("length", text)
        elif text:
            self._send(text)

    def _sample(self, logits: Tensor) -> int:
        masked = torch.where(self._allowed, logits.cpu(), -torch.inf)
        token = sample_next(masked, self._request.temperature, self._request.top_p, self._random)
        self.position += len(self._unread)
        self._unread = [token]
        self._ids.append(token)
        self._count += 1
        return token

    def _finish(self, reason: str, text: str = "") -> None:
        self._finish_reason = reason
        if not self._stops.reached:
            text += self._stops.feed(self._decoder.finish()) + self._stops.finish()
        self._send(text, reason)

    def _send(self, text: str, reason: str | None = None) -> None:
        """Send a piece with the scores of its tokens; an end without a stop sequence sends all that are left."""
        self._sent += len(text)
        sends_all = reason is not None and not self._stops.reached
        ready = [score for score in self._scores if sends_all or score.offset < self._sent]
        self._scores = self._scores[len(ready) :]  # offsets never decrease
        self._request.sink(GeneratedText(text, self._count, reason, tuple(ready)))

    def _decode_prompt(self) -> tuple[str, list[int]]:
        """Text of the prompt, and the offset of each of its tokens in it."""
        pieces, offsets = list[str](), list[int]()
        for identifier in self._ids:
            offsets.append(self._characters)
            pieces.append(self._decoder.feed(identifier))
            self._characters += len(pieces[-1])
        return "".join(pieces), offsets

    def _first_scores(self) -> list[ScoredToken]:
        """Score of the prompt's first token, which no token precedes; none for the token that begins a text."""
        first = self._ids[0]
        text, content = self._tokenizer.token_text(first), self._tokenizer.token_content(first)
        return [] if isinstance(self._request.prompt, str) else [ScoredToken(text, content, 0, None)]

    def _score_prompt(self, rows: Tensor) -> None:
        """Score the tokens after those that were read. rows (t, vocabulary). Sends the prompt after its last token."""
        assert self._prompt_scores is not None
        begin = self.position + 1
        self.position += len(rows)
        end = min(self.position + 1, self._prompt_tokens)
        targets, offsets = self._ids[begin:end], self._offsets[begin:end]
        self._prompt_scores += self._scored(rows[: len(targets)], targets, offsets)
        if self.position == self._prompt_tokens:
            self._request.sink(GeneratedText(self._prompt_text, 0, None, tuple(self._prompt_scores)))
            self._prompt_scores, self._unread = None, []

    def _scored(self, rows: Tensor, targets: list[int], offsets: list[int]) -> list[ScoredToken]:
        """Score tokens by the logits (t, vocabulary) of their places."""
        logprobs = rows.float().log_softmax(-1).cpu()
        if not bool(torch.isfinite(logprobs).all()):
            raise ValueError("the logits are not finite")
        values, ids = logprobs.topk(min(self._request.logprobs or 0, rows.shape[1]))
        text, content = self._tokenizer.token_text, self._tokenizer.token_content
        scores = list[ScoredToken]()
        for place, (target, offset) in enumerate(zip(targets, offsets, strict=True)):
            likeliest = zip(map(int, ids[place]), map(float, values[place]), strict=True)
            top = tuple((text(identifier), content(identifier), value) for identifier, value in likeliest)
            scores.append(ScoredToken(text(target), content(target), offset, logprobs[place, target].item(), top))
        return scores


def prompt_ids(tokenizer: Tokenizer, prompt: str | tuple[int, ...], context: int) -> list[int]:
    """Return the ids of a prompt: a text after the token that begins one, ids as they are.

    Raises ContextLengthError for more than `context` ids, UsageError for ids that are not the tokenizer's.
    """
    if isinstance(prompt, str):
        ids: list[int] = tokenizer.encode(prompt, bos=True).tolist()
    else:
        ids = list(prompt)
        wrong = next((identifier for identifier in ids if not 0 <= identifier < tokenizer.size), None)
        if wrong is not None or not ids:
            raise UsageError(f"The tokenizer has no id {wrong}.", f"Use the ids 0 to {tokenizer.size - 1}.")
    if len(ids) > context:
        raise ContextLengthError(
            f"The prompt has {len(ids):,} tokens, but the model reads at most {context:,} at once.", "Shorten it."
        )
    return ids


def allowed_ids(tokenizer_size: int, vocabulary_size: int) -> Tensor:
    """Mask (vocabulary,) of ids that may be generated: those of bytes, and the end of a text."""
    ids = torch.arange(vocabulary_size)
    return ((ids >= FIRST_BYTE_ID) & (ids < tokenizer_size)) | (ids == EOS)


_LOG = logging.getLogger(__name__)

CANCEL_LOOK_SECONDS = 0.2
END_SECONDS = 5.0  # to notify the stages of the end of a text; they forget it after a timeout anyway


class InferenceSession(Protocol):
    """All stages of a model while they read one text.

    Invariant: the logits equal those of the unsplit model with the weights that the stages have at that moment.
    """

    async def advance(self, completion: Completion) -> None:
        """Add at least one token to an unfinished completion. Raises NotReadyError if this is not possible."""
        ...

    async def end(self) -> None:
        """Free the stages' memory of the text."""
        ...


LONG_PROMPT = 10_000  # characters or ids; encoding fewer takes a few milliseconds


class TextGenerator:
    """Continues prompts, one completion at a time so that memory stays bounded."""

    def __init__(self, architecture: Architecture, tokenizer: Tokenizer, begin: Callable[[], InferenceSession]) -> None:
        self._architecture = architecture
        self._tokenizer = tokenizer
        self._begin = begin
        self._turn = anyio.Lock()

    async def generate(self, request: Generate) -> GenerationSummary:
        """Run one request. Its pieces go to the request's sink from a thread of this node.

        Raises ContextLengthError for a prompt longer than the context, UsageError for ids that are not the tokenizer's,
        and NotReadyError if no node reads the text for one of the stages.
        """
        async with self._turn:
            completion = await self._prepare(request)
            completion.begin()
            reading = self._begin()
            try:
                await _unless_cancelled(request, completion, reading)
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(END_SECONDS):
                    await reading.end()
            completion.cancel()
            return completion.summary()

    async def _prepare(self, request: Generate) -> Completion:
        """Encode the prompt; a long one on another thread, so that the node's tasks continue."""
        if len(request.prompt) <= LONG_PROMPT:
            return Completion(self._architecture, self._tokenizer, request)
        return await anyio.to_thread.run_sync(Completion, self._architecture, self._tokenizer, request)


async def _unless_cancelled(request: Generate, completion: Completion, reading: InferenceSession) -> None:
    """Run the completion to its end or until the request is cancelled."""
    failure: NotReadyError | None = None

    async def look() -> None:
        while not request.cancelled.is_set():
            await anyio.sleep(CANCEL_LOOK_SECONDS)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        try:
            while completion.wants_token():
                await reading.advance(completion)
        except NotReadyError as error:
            failure = error  # raised on its own, not in an exception group
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


SLICE_SECONDS = 0.1  # per job; a microbatch may run before the next job, so that training and text both progress
PATIENCE_SECONDS = 20.0  # without a replica for a stage, and after the first failure of a token
RETRY_SECONDS = 0.25
SCORED_AT_ONCE = 32  # prompt tokens; their logits are in memory together
OWN_TEXT = 0  # session of the only text that this node reads with only its own stages


class LocalInferenceSession:
    """Inference session of a node that holds every stage. A job of the compute thread generates several tokens."""

    def __init__(
        self,
        compute: ComputeThread,
        stages: Sequence[StageTexts],
        node_id: NodeId,
        slice_seconds: float = SLICE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stages` contains all stages of the model in the order of their layers."""
        self._compute = compute
        self._stages = tuple(stages)
        self._node_id = node_id
        self._slice_seconds = slice_seconds
        self._clock = clock

    async def advance(self, completion: Completion) -> None:
        """Generate tokens for one slice of time. The pieces go to the sink from the compute thread."""
        try:
            texts = [stage.text(self._node_id, OWN_TEXT) for stage in self._stages]
            await self._compute.run(lambda: self._slice(completion, texts), Priority.TEXT)
        except StageError as error:
            raise _not_ready(error) from error

    async def end(self) -> None:
        for stage in self._stages:
            stage.forget(self._node_id, OWN_TEXT)

    def _slice(self, completion: Completion, texts: Sequence[Text]) -> None:
        """Generate at least one token, and more until the slice of time is used up."""
        until = self._clock() + self._slice_seconds
        while completion.wants_token():
            completion.take(self._logits(completion, texts))
            if self._compute.cancelled.is_set():
                completion.cancel()
            if self._clock() >= until:
                return

    def _logits(self, completion: Completion, texts: Sequence[Text]) -> Tensor:
        try:
            return self._through(completion, texts)
        except UnreadTextError:  # the weights have changed since the last slice
            completion.read_again()
            return self._through(completion, texts)

    def _through(self, completion: Completion, texts: Sequence[Text]) -> Tensor:
        ids, every = torch.tensor([completion.unread(SCORED_AT_ONCE)]), completion.is_scoring_prompt
        values = ids
        for stage, text in zip(self._stages, texts, strict=True):
            values = stage.advance(text, completion.position, values, every_position=every, ids=ids)
        return values


class SwarmInferenceSession:
    """Inference session over the nodes of a swarm. Each stage keeps its node while that works.

    After any failure of a stage (changed weights, lost node, forgotten text), all stages read the text again from its
    start, with another node for a lost one.
    """

    def __init__(
        self,
        routing: Routing,
        session: int,
        missing: Callable[[], str] = lambda: "",
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """`session` is unique among this node's texts; `missing` describes the layers that no node holds."""
        self._routing = routing
        self._session = session
        self._missing = missing
        self._patience_seconds = patience_seconds
        self._hops: dict[int, StageClient] = {}
        self._refusals: dict[int, str] = {}  # last refusal of each stage
        self._blame_rules: dict[int, BlameRule] = {}  # by stage, about the tokens that it has not read yet
        self.read_again = 0  # number of times that the text was read again from its start

    async def advance(self, completion: Completion) -> None:
        gives_up_at: float | None = None
        while True:
            try:
                logits = await self._through(completion)
                break
            except StageError as error:
                if gives_up_at is None:
                    gives_up_at = anyio.current_time() + self._patience_seconds
                if error.retry is Retry.NEVER or anyio.current_time() >= gives_up_at:
                    raise _not_ready(error) from error
                if not isinstance(error, UnreadTextError):
                    _LOG.info("A text is read again: %s", error)
                    await anyio.sleep(RETRY_SECONDS)
                self.read_again += 1
                completion.read_again()
        await run_off_loop(lambda: completion.take(logits), logits)

    async def end(self) -> None:
        async with anyio.create_task_group() as tasks:
            for stage, hop in self._hops.items():
                tasks.start_soon(self._forget, stage, hop)

    async def _through(self, completion: Completion) -> Tensor:
        ids = torch.tensor([completion.unread()])  # a peer returns one position's logits: it scores token by token
        values = ids
        for stage in range(self._routing.stage_count):
            hop = self._hops.get(stage) or await self._found(stage)
            try:
                values = await hop.read(self._session, completion.position, values, ids)
            except StageError as error:
                self._blame_rules.setdefault(stage, BlameRule(self._routing, stage)).note(hop, error)
                if error.retry is Retry.ELSEWHERE or isinstance(error, StageBusyError):
                    del self._hops[stage]
                    self._refusals[stage] = error.message
                    self._routing.failed(stage, hop, error)
                raise
            self._blame_rules.pop(stage, None)
        return values

    async def _found(self, stage: int) -> StageClient:
        with anyio.move_on_after(self._patience_seconds):
            hop = self._hops[stage] = await self._routing.hop(stage)
            return hop
        reason = self._missing() or self._refusals.get(stage)
        reason = reason or f"Nobody answers for stage {stage + 1} of {self._routing.stage_count}."
        raise NotReadyError(f"The text cannot be continued now. {reason}", "Try again a little later.")

    async def _forget(self, stage: int, hop: StageClient) -> None:
        self._routing.left(stage, hop)
        try:
            await hop.forget(self._session)
        except StageError as error:
            _LOG.debug("A stage was not notified that a text is done: %s", error)


def _not_ready(error: StageError) -> NotReadyError:
    if isinstance(error, SpoiltMicrobatchError):
        return NotReadyError("The model's values are not finite numbers at present.", "Try again after a few steps.")
    return NotReadyError(f"The text cannot be continued now. {error.message}", "Try again a little later.")


PROMPTS: Final = ("Once upon a time", "The function returns", "The capital of France is")
MOST_TOKENS: Final = 32  # per text
MOST_CHARACTERS: Final = 400
MOST_SAMPLES: Final = 64
SHARE: Final = 0.01  # of the training time that sample texts may take
_FIRST_MARKS: Final = (0, 10, 100, 1_000)


class StoredSamples(Struct, frozen=True, forbid_unknown_fields=True):
    """The samples of a run as they are stored, with the prompts that they continue; at most about 200 kB of JSON."""

    prompts: Annotated[tuple[str, ...], Meta(min_length=1, max_length=len(PROMPTS))] = PROMPTS
    samples: Annotated[tuple[TextSample, ...], Meta(max_length=MOST_SAMPLES)] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a sample with impossible numbers, or with other texts than one for each prompt."""
        if any(len(text) > MOST_CHARACTERS for text in (*self.prompts, *(t for s in self.samples for t in s.texts))):
            raise ValueError(f"a text has more than {MOST_CHARACTERS} characters")
        for sample in self.samples:
            if not 0 <= sample.step <= sample.last_step or sample.seconds < 0 or len(sample.texts) != len(self.prompts):
                raise ValueError(f"the sample of step {sample.step} has impossible values")


def next_mark(last_step: int | None) -> int:
    """Step at which the next sample is due: 0, 10, 100, 1,000, then doubling."""
    if last_step is None:
        return _FIRST_MARKS[0]
    for mark in _FIRST_MARKS:
        if mark > last_step:
            return mark
    mark = 2 * _FIRST_MARKS[-1]
    while mark <= last_step:
        mark *= 2
    return mark


def is_due(steps: int, samples: tuple[TextSample, ...], trained_seconds: float) -> bool:
    """Whether a model after `steps` steps and `trained_seconds` of training must write a sample now.

    The first sample has no known cost. Each later one waits until the total cost is within SHARE of the training time.
    """
    if not samples:
        return True
    if len(samples) >= MOST_SAMPLES or steps < next_mark(samples[-1].last_step):
        return False
    spent = sum(sample.seconds for sample in samples) + samples[-1].seconds
    return spent <= SHARE * trained_seconds
