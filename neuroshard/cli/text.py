"""`neuroshard generate`: let the model in training continue a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from neuroshard.cli.options import AsJson, DataDir, Port
from neuroshard.cli.remote import DemoNode

if TYPE_CHECKING:
    from neuroshard.cli.client import NodeClient

GENERATION_SECONDS = 310.0  # the node itself gives up after 300
_EVENT = "data: "


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the continuation.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 always takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of probability to draw from.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal text from equal weights.")] = None,
    data_dir: DataDir = None,
    port: Port = None,
    demo: DemoNode = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with the model that the running node is training."""
    from neuroshard.cli.client import connect

    client = connect(data_dir, port, demo=demo)
    body: dict[str, object] = {
        "prompt": prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),  # a terminal may send any bytes
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "stream": not as_json,
    }
    if seed is not None:
        body["seed"] = seed
    if as_json:
        typer.echo(json.dumps(client.post("/v1/completions", body, GENERATION_SECONDS)))
        return
    for piece in _pieces(client, body):
        typer.echo(piece, nl=False)
    typer.echo("")


def _pieces(client: NodeClient, body: Mapping[str, object]) -> Iterator[str]:
    """The text as it comes. Raises NetworkRefusedError when no node answers, RequestRefusedError for its refusal."""
    import httpx

    from neuroshard.cli.client import no_node

    try:
        with client.http.stream(
            "POST",
            f"{client.base_url}/v1/completions",
            json=body,
            headers=client.headers(),
            timeout=GENERATION_SECONDS,
        ) as response:
            if response.is_error:
                response.read()
                client.refuse(response)
            for line in response.iter_lines():
                yield _text_of(line)
    except httpx.TransportError as error:
        raise no_node(client.base_url) from error


def _text_of(line: str) -> str:
    """The text that one line of the event stream carries. Raises RequestRefusedError for an error on the way."""
    from neuroshard.cli.client import RequestRefusedError

    if not line.startswith(_EVENT) or line == f"{_EVENT}[DONE]":
        return ""
    event = cast("dict[str, Any]", json.loads(line[len(_EVENT) :]))
    if "error" in event:
        raise RequestRefusedError(f"The node broke off: {event['error']['message']}")
    return "".join(choice["text"] for choice in event.get("choices", []))
