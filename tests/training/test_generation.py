from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.data.tokenizer import EOS, FIRST_BYTE_ID, Tokenizer, byte_table
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


def test_a_long_prompt_loses_its_beginning_and_the_summary_says_so(compute: ComputeThread) -> None:
    generator, sink = generator_of(compute, [model_of()]), Pieces()
    prompt = "zq" * 20
    summary = trio.run(generator.generate, request(sink, prompt, max_tokens=20))
    assert summary.truncated_prompt_tokens == 41 - TEXT_SHAPE.sequence_length
    assert summary.prompt_tokens == TEXT_SHAPE.sequence_length
    assert summary.completion_tokens == 20 or summary.finish_reason == "stop"


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
