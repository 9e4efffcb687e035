"""Commands that use the model in training: `generate` continues a text, `chat` keeps a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from neuroshard.cli.options import AsJson, DataDir, Port
from neuroshard.cli.remote import DemoNode
from neuroshard.types import MOST_COMPLETION_TOKENS

if TYPE_CHECKING:
    from neuroshard.cli.client import NodeClient

GENERATION_SECONDS = 310.0  # the node itself gives up after 300
TOO_LONG = "context_length_exceeded"
_EVENT = "data: "

Temperature = Annotated[
    float, typer.Option(min=0.0, max=2.0, metavar="T", help="0 always chooses the likeliest token.")
]
TopP = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, metavar="P", help="Choose among the likeliest tokens with this total probability."),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The same seed and weights give the same text.")]


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    max_tokens: Annotated[
        int, typer.Option(min=1, max=MOST_COMPLETION_TOKENS, metavar="N", help="Longest continuation.")
    ] = 64,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    seed: Seed = None,
    data_dir: DataDir = None,
    port: Port = None,
    demo: DemoNode = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with the model that the running node is training."""
    from neuroshard.cli.client import connect

    client = connect(data_dir, port, demo=demo)
    body: dict[str, object] = {
        "prompt": _printable(prompt),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stream": not as_json,
    }
    if as_json:
        typer.echo(json.dumps(client.post("/v1/completions", body, GENERATION_SECONDS)))
        return
    for piece in _pieces(client, "/v1/completions", body):
        typer.echo(piece, nl=False)
    typer.echo("")


def chat(
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="Text before the conversation.")] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=MOST_COMPLETION_TOKENS, metavar="N", help="Longest reply.")
    ] = 128,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    seed: Seed = None,
    data_dir: DataDir = None,
    port: Port = None,
    demo: DemoNode = False,
) -> None:
    """Hold a conversation with the model that the running node is training: one message per line, until Ctrl+D.

    When the conversation becomes longer than the model can read, its oldest messages are left out.
    """
    from neuroshard.cli.client import connect

    client = connect(data_dir, port, demo=demo)
    before = [] if system is None else [{"role": "system", "content": _printable(system)}]
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stream": True}
    turns = list[dict[str, str]]()
    for line in _lines():
        turns.append({"role": "user", "content": _printable(line)})
        reply = ""
        for piece in _reply(client, options, before, turns):
            typer.echo(piece, nl=False)
            reply += piece
        typer.echo("")
        turns.append({"role": "assistant", "content": reply})


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty, at a terminal after a prompt each."""
    stdin = typer.get_text_stream("stdin")
    while True:
        if stdin.isatty():
            typer.echo("> ", nl=False)
        line = stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _reply(
    client: NodeClient, options: Mapping[str, object], before: list[dict[str, str]], turns: list[dict[str, str]]
) -> Iterator[str]:
    """Yield the reply to the last turn. Oldest turns are removed from `turns` until the node can read the rest."""
    from neuroshard.cli.client import NodeRefusedError

    while True:
        try:
            yield from _pieces(client, "/v1/chat/completions", {**options, "messages": [*before, *turns]})
        except NodeRefusedError as error:
            if error.code != TOO_LONG or len(turns) == 1:
                raise
            del turns[:2]  # a message and its reply
            typer.echo(
                "(The conversation is longer than the model can read: the oldest message and its reply are left out.)",
                err=True,
            )
        else:
            return


def _printable(text: str) -> str:
    """Replace bytes that are not text: a terminal may send any."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _pieces(client: NodeClient, path: str, body: Mapping[str, object]) -> Iterator[str]:
    """Yield the text as it arrives. Raises NetworkRefusedError without a node, NodeRefusedError for its refusal."""
    import httpx

    from neuroshard.cli.client import no_node

    try:
        with client.http.stream(
            "POST", client.base_url + path, json=body, headers=client.headers(), timeout=GENERATION_SECONDS
        ) as response:
            if response.is_error:
                response.read()
                client.refuse(response)
            for line in response.iter_lines():
                yield _text_of(line)
    except httpx.TransportError as error:
        raise no_node(client.base_url) from error


def _text_of(line: str) -> str:
    """The text in one line of the event stream. Raises NodeRefusedError if the line reports an error."""
    from neuroshard.cli.client import NodeRefusedError

    if not line.startswith(_EVENT) or line == f"{_EVENT}[DONE]":
        return ""
    event = cast("dict[str, Any]", json.loads(line[len(_EVENT) :]))
    if "error" in event:
        raise NodeRefusedError(f"The node stopped the text: {event['error']['message']}")
    choices = cast("list[dict[str, Any]]", event.get("choices", []))
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)
