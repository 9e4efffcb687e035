"""The OpenAI-compatible routes: shapes, streaming, errors, limits and clients that go away."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from neuroshard.api.context import ApiLimits
from neuroshard.errors import ContextLengthError, NotReadyError
from neuroshard.status.board import Generate
from tests.worlds.api import Api, FakeNode, make_api

ASK: dict[str, object] = {"model": "neuroshard", "prompt": "one two three four", "max_tokens": 3}


def pieces(response: httpx.Response) -> list[dict[str, object]]:
    """The data of a streamed completion, which must end with [DONE]."""
    blocks = [block.removeprefix("data: ") for block in response.text.strip().split("\n\n")]
    assert blocks.pop() == "[DONE]"
    return [json.loads(block) for block in blocks]


def test_the_model_is_listed(api: Api) -> None:
    body = api.get("/v1/models").json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["neuroshard", "neuroshard-abababababab"]
    assert body["data"][0]["object"] == "model"


def test_a_whole_completion(api: Api) -> None:
    response = api.command("POST", "/v1/completions", ASK)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "neuroshard"
    assert body["choices"] == [{"text": " one two three", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}


def test_all_options_reach_the_node(api: Api) -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "stop": ["a", "b"], "seed": 7, "n": 1, "echo": True}
    body = api.command("POST", "/v1/completions", {**ASK, "prompt": ["one two"], **options}).json()
    assert body["choices"][0]["text"] == "one two one two"
    command = api.node.taken[-1]
    assert isinstance(command, Generate)
    assert (command.prompt, command.max_tokens, command.temperature, command.top_p) == ("one two", 3, 0.5, 0.9)
    assert (command.stop, command.seed) == (("a", "b"), 7)
    api.command("POST", "/v1/completions", {"prompt": "x", "stop": "end"})
    command = api.node.taken[-1]
    assert isinstance(command, Generate)
    assert (command.stop, command.max_tokens, command.temperature) == (("end",), 16, 1.0)


def test_a_streamed_completion(api: Api) -> None:
    response = api.command(
        "POST", "/v1/completions", {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *texts, usage = pieces(response)
    assert [piece["choices"][0]["text"] for piece in texts] == [" one", " two", " three"]  # type: ignore[index]
    assert [piece["choices"][0]["finish_reason"] for piece in texts] == [None, None, "stop"]  # type: ignore[index]
    assert len({piece["id"] for piece in texts}) == 1
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}


@pytest.mark.parametrize(
    "change",
    [
        {"n": 2},
        {"prompt": []},
        {"prompt": [1, "a"]},
        {"prompt": [-1]},
        {"prompt": [[1], []]},
        {"prompt": ["a"] * 129},
        {"prompt": None},
        {"prompt": "x" * 1_000_001},
        {"prompt": "\ud800"},
        {"max_tokens": -1},
        {"max_tokens": 10**9},
        {"max_tokens": "3"},
        {"temperature": -1},
        {"temperature": 3},
        {"top_p": 0},
        {"stop": ["a"] * 5},
        {"stop": ""},
        {"seed": 2**64},
        {"logprobs": 21},
        {"logprobs": True},
        {"logit_bias": {"50256": -100}},
        {"best_of": 2},
        {"presence_penalty": 1},
        {"unheard_of": 1},
    ],
)
def test_what_cannot_be_done_is_refused(api: Api, change: dict[str, object]) -> None:
    content = json.dumps({**ASK, **change}).encode()
    headers = {**api.secret, "Content-Type": "application/json"}
    response = api.call("POST", "/v1/completions", headers=headers, content=content)
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", next(iter(change)))
    assert api.node.taken == []


def test_several_prompts_are_continued_one_after_the_other(api: Api) -> None:
    body = api.command("POST", "/v1/completions", {**ASK, "prompt": ["a b", "c"]}).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, " a b"), (1, " c")]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    streamed = pieces(api.command("POST", "/v1/completions", {**ASK, "prompt": [[11, 12], [13]], "stream": True}))
    choices = [piece["choices"][0] for piece in streamed]  # type: ignore[index]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, " 11"), (0, " 12"), (1, " 13")]
    assert [command.prompt for command in api.node.taken if isinstance(command, Generate)] == [
        "a b",
        "c",
        (11, 12),
        (13,),
    ]


def test_a_prompt_beyond_the_context_has_openais_code(api: Api) -> None:
    api.node.refuse = ContextLengthError("The prompt has 100,000 tokens, but the model reads at most 64 at once.")
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CONVERSATION)):
        for stream in (False, True):
            response = api.command("POST", path, {**body, "stream": stream})
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert "100,000 tokens" in response.json()["error"]["message"]


def test_one_model_is_described(api: Api) -> None:
    card = api.get("/v1/models/neuroshard").json()
    assert (card["id"], card["object"], card["max_model_len"]) == ("neuroshard", "model", 64)
    response = api.get("/v1/models/gpt-9")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


CONVERSATION: dict[str, object] = {
    "messages": [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "four"},
    ],
    "max_tokens": 5,
}
SCRIPT = "System: Be brief.\nUser: one two\nAssistant: three\nUser: four\nAssistant:"


def test_a_conversation_becomes_one_text(api: Api) -> None:
    body = api.command("POST", "/v1/chat/completions", CONVERSATION).json()
    (choice,) = body["choices"]
    assert (body["object"], choice["message"]["role"], choice["finish_reason"]) == (
        "chat.completion",
        "assistant",
        "stop",
    )
    assert choice["message"]["content"] == "System: Be brief. User: one"  # the fake node repeats the prompt's words
    assert "delta" not in choice
    command = api.node.taken[-1]
    assert isinstance(command, Generate)
    assert (command.prompt, command.max_tokens, command.logprobs) == (SCRIPT, 5, None)
    assert command.stop == ("\nUser:", "\nSystem:", "\nAssistant:")


def test_a_streamed_reply(api: Api) -> None:
    asked = {**CONVERSATION, "stream": True, "stream_options": {"include_usage": True}, "stop": "end"}
    first, *deltas, usage = pieces(api.command("POST", "/v1/chat/completions", asked))
    assert first["object"] == "chat.completion.chunk"
    choices = [piece["choices"][0] for piece in (first, *deltas)]  # type: ignore[index]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in choices) == "System: Be brief. User: one"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert usage["usage"]["completion_tokens"] == 5  # type: ignore[index]
    command = api.node.taken[-1]
    assert isinstance(command, Generate)
    assert command.stop[-1] == "end"


def test_any_number_of_messages_that_a_body_can_have_reaches_the_model(api: Api) -> None:
    """The node counts tokens: a long conversation gets the error of long prompts, not one about its form."""
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")] * 10_000
    response = api.command("POST", "/v1/chat/completions", {**CONVERSATION, "messages": turns})
    assert response.status_code == 200, response.text
    command = api.node.taken[-1]
    assert isinstance(command, Generate)
    assert command.prompt == "User: a\nAssistant: a\n" * 10_000 + "Assistant:"


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"max_tokens": 0},
        {"n": 2},
        {"top_logprobs": 21},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_chat_members_that_are_not_supported_are_refused(api: Api, change: dict[str, object]) -> None:
    response = api.command("POST", "/v1/chat/completions", {**CONVERSATION, **change})
    assert response.status_code == 422, response.text
    assert response.json()["error"]["param"] == next(iter(change))
    assert api.node.taken == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_only_the_secret_or_a_session_may_ask_the_model(api: Api, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        response = api.call("POST", path, headers={**headers, "Content-Type": "application/json"}, content=b"{}")
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_an_unknown_model_is_404_in_both_shapes(api: Api) -> None:
    response = api.command("POST", "/v1/completions", {**ASK, "model": "gpt-9"})
    assert response.status_code == 404
    body = response.json()
    assert body["type"] == "urn:neuroshard:problem:unknown-model"
    assert body["error"]["code"] == "model_not_found"
    assert "gpt-9" in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_piece_has_its_status(api: Api, stream: bool) -> None:
    api.node.refuse = NotReadyError("The model is paused.")
    response = api.command("POST", "/v1/completions", {**ASK, "stream": stream})
    assert response.status_code == 503
    assert response.json()["error"]["message"].startswith("The model is paused.")


def test_an_error_in_the_middle_is_told_in_the_stream(api: Api) -> None:
    api.node.refuse_in_the_middle = NotReadyError("The node is stopping.")
    *_, last = pieces(api.command("POST", "/v1/completions", {**ASK, "stream": True}))
    assert last["error"]["message"] == "The node is stopping."  # type: ignore[index]
    assert api.command("POST", "/v1/completions", ASK).status_code == 503


def test_a_completion_has_a_deadline(node: FakeNode) -> None:
    api = make_api(node, limits=ApiLimits(completion_seconds=0.05))
    node.hold.clear()
    response = api.command("POST", "/v1/completions", ASK)
    assert response.status_code == 504
    assert node.cancelled.wait(5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_work(serve: Callable[..., Api], node: FakeNode, stream: bool) -> None:
    api = serve(ApiLimits(completions=1))
    node.hold.clear()
    with httpx.Client(base_url=api.base_url, headers=api.secret, timeout=0.3) as client:
        with pytest.raises(httpx.TimeoutException):
            client.post("/v1/completions", json={**ASK, "stream": stream})
        assert node.cancelled.wait(5)
        node.hold.set()
        client.timeout = httpx.Timeout(5)
        assert client.post("/v1/completions", json=ASK).status_code == 200  # its slot is free again


def test_only_some_completions_run_at_once(serve: Callable[..., Api], node: FakeNode) -> None:
    api = serve(ApiLimits(completions=1))
    node.hold.clear()
    with httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as running:
            assert running.status_code == 200
            refused = client.post("/v1/completions", json=ASK)
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            node.hold.set()
            assert running.read().endswith(b"data: [DONE]\n\n")
        assert client.post("/v1/completions", json=ASK).status_code == 200


@pytest.mark.parametrize(
    "prompt", [[{}] * 20_000, [""] * 20_000, [[""] * 20_000], [-1] * 20_000, [[-1]] * 20_000, [["x", 1]] * 20_000]
)
def test_a_long_list_of_wrong_prompts_gets_a_short_answer(api: Api, prompt: list[object]) -> None:
    """Work and memory for an error must not grow with the number of wrong items."""
    response = api.command("POST", "/v1/completions", {"prompt": prompt})
    assert response.status_code in (400, 422)
    assert len(response.content) < 10_000
