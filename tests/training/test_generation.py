from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.data.tokenizer import EOS, FIRST_BYTE_ID, Tokenizer, byte_table
from neuroshard.errors import ContextLengthError, UsageError
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.status.board import GeneratedText
from neuroshard.training.text_generation import StopSequences, allowed_ids
from tests.worlds.stages import TEXT_SHAPE, TOKENIZER, Pieces, continuation, generator_of, model_of, prompt_ids, request


@pytest.mark.parametrize("slice_seconds", [0.0, 10.0])
def test_greedy_text_equals_the_uncached_one(compute: ComputeThread, slice_seconds: float) -> None:
    model, sink = model_of(), Pieces()
    generator = generator_of(compute, [model], slice_seconds)
    summary = trio.run(generator.generate, request(sink, max_tokens=8, temperature=0.0))
    ids = continuation(model, prompt_ids(), 8)
    assert EOS not in ids
    assert sink.text == TOKENIZER.decode(ids)
    assert (summary.completion_tokens, summary.finish_reason) == (8, "length")
    assert summary.prompt_tokens == len(TOKENIZER.encode("the th", bos=True))
    assert sink.pieces[-1].finish_reason == "length"
    assert [piece.finish_reason for piece in sink.pieces[:-1]] == [None] * (len(sink.pieces) - 1)
    assert sink.threads == {"neuroshard-compute"}


@pytest.mark.parametrize("cuts", [(0, 1, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_stages_in_a_chain_give_the_text_of_the_model_in_one_piece(
    compute: ComputeThread, cuts: tuple[int, ...]
) -> None:
    parts = [model_of(start, stop) for start, stop in pairwise(cuts)]
    texts = list[str]()
    for models in ([model_of()], parts):
        sink = Pieces()
        asked = request(sink, max_tokens=2 * TEXT_SHAPE.sequence_length, temperature=0.7)  # beyond what the caches hold
        trio.run(generator_of(compute, models).generate, asked)
        texts.append(sink.text)
    assert len(texts[0]) > TEXT_SHAPE.sequence_length
    assert texts[1] == texts[0]


def test_equal_seeds_give_equal_texts_and_only_usable_ids(compute: ComputeThread) -> None:
    generator, texts = generator_of(compute, [model_of()]), list[str]()
    for seed in (1, 1, 2):
        sink = Pieces()
        trio.run(generator.generate, request(sink, seed=seed, max_tokens=30, temperature=3.0))
        texts.append(sink.text)
    assert texts[0] == texts[1] != texts[2]
    allowed = allowed_ids(TOKENIZER.size, TEXT_SHAPE.vocabulary_size).nonzero().flatten().tolist()
    assert allowed == [EOS, *range(FIRST_BYTE_ID, TOKENIZER.size)]


def test_one_callable_a_token_lets_training_in_between(compute: ComputeThread) -> None:
    order = list[str]()
    generator = generator_of(compute, [model_of()], slice_seconds=0.0)

    async def train() -> None:
        for _ in range(4):
            await compute.run(lambda: order.append("microbatch"))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generator.generate, request(lambda _: order.append("piece"), seed=8, max_tokens=8))
            nursery.start_soon(train)

    trio.run(main)
    last = len(order) - 1 - order[::-1].index("microbatch")
    assert "piece" in order[:last] or order.count("piece") < 3
    assert order.index("microbatch") < len(order) - 1


def test_a_prompt_beyond_the_context_is_refused_with_its_length(compute: ComputeThread) -> None:
    generator, sink = generator_of(compute, [model_of()]), Pieces()
    context = TEXT_SHAPE.sequence_length
    for prompt in ("zq" * 20, "x" * 100_000, (FIRST_BYTE_ID,) * 100_000):
        with pytest.raises(ContextLengthError, match=rf"[\d,]+ tokens, but the model reads at most {context} "):
            trio.run(generator.generate, request(sink, prompt, max_tokens=20))
    assert sink.pieces == []
    summary = trio.run(generator.generate, request(sink, (FIRST_BYTE_ID,) * context, max_tokens=1))
    assert (summary.prompt_tokens, summary.completion_tokens) == (context, 1)


@pytest.mark.parametrize("ids", [(), (TOKENIZER.size,), (2**31 - 1,)])
def test_ids_that_the_tokenizer_does_not_have_are_refused(compute: ComputeThread, ids: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="The tokenizer has no id"):
        trio.run(generator_of(compute, [model_of()]).generate, request(Pieces(), ids))


@torch.no_grad()
def logprobs_of(ids: list[int]) -> torch.Tensor:
    """Log-probabilities (n, vocabulary) after each token, from the model without a cache."""
    return model_of().logits(model_of()(torch.tensor([ids])))[0].log_softmax(-1)


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_is_scored_as_the_model_in_one_piece_scores_it(compute: ComputeThread, as_ids: bool) -> None:
    models, sink = [model_of(0, 1), model_of(1, 3)], Pieces()
    ids = prompt_ids("the \u20ac th\u00e9 the")
    assert len(ids) < TEXT_SHAPE.sequence_length
    prompt = tuple(ids) if as_ids else "the \u20ac th\u00e9 the"
    asked = request(sink, prompt, max_tokens=0, echo=True, logprobs=2)
    summary = trio.run(generator_of(compute, models).generate, asked)
    assert (summary.completion_tokens, summary.finish_reason, sink.text) == (0, "length", "the \u20ac th\u00e9 the")
    scores = [score for piece in sink.pieces for score in piece.scores]
    expected = logprobs_of(ids)
    if as_ids:
        assert (scores[0].text, scores[0].logprob, scores[0].top) == ("<|begin_of_text|>", None, ())
        scores = scores[1:]
    assert [score.content for score in scores] == [TOKENIZER.decode_bytes([i]) for i in ids[1:]]
    assert [score.logprob for score in scores] == pytest.approx(
        [expected[place, target].item() for place, target in enumerate(ids[1:])], abs=1e-4
    )
    for place, score in enumerate(scores):
        assert [value for _, _, value in score.top] == pytest.approx(expected[place].topk(2).values.tolist(), abs=1e-4)
        assert score.offset == len(TOKENIZER.decode_bytes(ids[: place + 1]).decode(errors="ignore"))


def test_generated_tokens_are_scored_up_to_the_stop_sequence(compute: ComputeThread) -> None:
    generator, sink = generator_of(compute, [model_of()]), Pieces()
    trio.run(generator.generate, request(sink, max_tokens=12, temperature=0.0, logprobs=1, echo=True))
    scores = [score for piece in sink.pieces for score in piece.scores]
    ids = prompt_ids()
    expected = [*ids, *continuation(model_of(), ids, 12)]
    assert [score.content for score in scores] == [TOKENIZER.decode_bytes([i]) for i in expected[1:]]
    rows = logprobs_of(expected)
    assert [score.logprob for score in scores] == pytest.approx(
        [rows[place, target].item() for place, target in enumerate(expected[1:])], abs=1e-4
    )
    written = sink.text.removeprefix("the th")
    stopped = Pieces()
    asked = request(stopped, max_tokens=12, temperature=0.0, logprobs=0, stop=(written[3:5],))
    trio.run(generator.generate, asked)
    kept = [score for piece in stopped.pieces for score in piece.scores]
    assert stopped.text == written[: written.find(written[3:5])]
    assert [score.offset for score in kept] == [
        score.offset for score in scores[len(ids) - 1 :] if score.offset < len("the th") + len(stopped.text)
    ]


def test_a_cancelled_request_ends_at_once(compute: ComputeThread) -> None:
    generator, sink = generator_of(compute, [model_of()]), Pieces()
    asked = request(sink, max_tokens=10_000)

    def cancel_soon(piece: GeneratedText) -> None:
        sink(piece)
        asked.cancelled.set()

    asked = replace(asked, sink=cancel_soon)
    summary = trio.run(generator.generate, asked)
    assert summary.completion_tokens < 20
    assert sink.pieces[-1].finish_reason == "stop"


def test_nothing_is_generated_for_zero_tokens(compute: ComputeThread) -> None:
    sink = Pieces()
    summary = trio.run(generator_of(compute, [model_of()]).generate, request(sink, "", max_tokens=0))
    assert (summary.prompt_tokens, summary.completion_tokens, summary.finish_reason) == (1, 0, "length")


def test_a_stop_sequence_ends_the_text_before_it(compute: ComputeThread) -> None:
    model, whole = model_of(), Pieces()
    generator = generator_of(compute, [model])
    trio.run(generator.generate, request(whole, max_tokens=16, temperature=0.0))
    stop = whole.text[2:4]
    sink = Pieces()
    summary = trio.run(generator.generate, request(sink, max_tokens=16, temperature=0.0, stop=(stop,)))
    assert sink.text == whole.text[: whole.text.index(stop)]
    assert summary.finish_reason == "stop"
    assert summary.completion_tokens < 16


@settings(deadline=None)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_sequences_are_found_across_any_boundaries(text: str, stops: list[str], data: st.DataObject) -> None:
    found = [index for stop in stops if (index := text.find(stop)) >= 0]
    sequences, out, rest = StopSequences(stops), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        out += sequences.feed(rest[:size])
        rest = rest[size:]
        assert text.startswith(out)
    out += sequences.finish()
    assert sequences.reached == bool(found)
    if not found:
        assert out == text
    else:  # whichever sequence is complete first ends it
        ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
        assert out == text[: len(out)]
        assert len(out) <= max(ends.values()) - 1
        assert not any(stop in out for stop in stops)


def test_byte_tokens_come_out_as_whole_characters() -> None:
    tokenizer = Tokenizer(byte_table())
    decoder, out = tokenizer.decoder(), list[str]()
    for identifier in tokenizer.encode("é—😀").tolist():
        out.append(decoder.feed(identifier))
    assert [piece for piece in out if piece] == ["é", "—", "😀"]
