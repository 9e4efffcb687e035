"""Programs that people already have, with a real node: the `openai` client, LangChain, `llm` and lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import exp
from pathlib import Path
from pydoc_data import topics
from typing import Any

import httpx
import pytest

from benchmarks.node_process import NodeProcess, running_node

pytestmark = pytest.mark.process


@dataclass(frozen=True)
class ServedModel:
    """A paused node, and the folder to which its model was exported in the same state."""

    node: NodeProcess
    exported: Path
    context: int

    @property
    def secret(self) -> str:
        return self.node.authorised()["Authorization"].removeprefix("Bearer ")


@pytest.fixture(scope="module")
def served(quick: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    folder = tmp_path_factory.mktemp("served")
    with running_node(folder / "node", quick) as node:
        node.wait_for("steps", lambda status: status["training"]["steps"] >= 20)
        node.post("/api/training/pause")
        node.post("/api/checkpoints")
        out = folder / "exported"
        command = [sys.executable, "-m", "neuroshard", "checkpoint", "export", "--out", str(out)]
        subprocess.run([*command, "--data-dir", str(folder / "node")], check=True)
        yield ServedModel(node, out, node.get("/v1/models")["data"][0]["max_model_len"])


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy between the clients and this computer's own address."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def needs(package: str, install: str = "") -> pytest.MarkDecorator:
    missing = find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install {install or package}")


@needs("openai", "'.[dev]'")
@pytest.mark.usefixtures("direct")
def test_the_openai_client(served: ServedModel) -> None:
    import openai

    with openai.OpenAI(base_url=f"{served.node.url}/v1", api_key=served.secret, max_retries=0) as client:
        assert client.models.list().data[0].id == "neuroshard"
        assert client.models.retrieve("neuroshard").object == "model"
        messages: list[Any] = [{"role": "user", "content": "What is a list?"}]
        reply = client.chat.completions.create(model="neuroshard", messages=messages, max_tokens=8, seed=1)
        text = reply.choices[0].message.content
        assert reply.usage is not None
        assert reply.usage.completion_tokens <= 8
        chunks = list(
            client.chat.completions.create(model="neuroshard", messages=messages, max_tokens=8, seed=1, stream=True)
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip() == text
        messages += [reply.choices[0].message, {"role": "user", "content": "And a dictionary?"}]
        assert client.chat.completions.create(model="neuroshard", messages=messages, max_tokens=2).choices
        whole = client.completions.create(
            model="neuroshard", prompt=["A list", "A tuple"], max_tokens=4, echo=True, logprobs=2
        )
        for choice, prompt in zip(whole.choices, ("A list", "A tuple"), strict=True):
            assert choice.text.startswith(prompt)
            assert choice.logprobs is not None
            assert choice.logprobs.text_offset is not None
            assert len(choice.logprobs.tokens or []) == len(choice.logprobs.text_offset)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="neuroshard", prompt="list " * 100_000)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-9")
    stranger = openai.OpenAI(base_url=f"{served.node.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_prompt_of_100_000_tokens_is_refused_and_training_continues(served: ServedModel) -> None:
    for prompt in ("x " * 100_000, [300] * 100_000):
        response = httpx.post(
            f"{served.node.url}/v1/completions",
            json={"prompt": prompt},
            headers=served.node.authorised(),
            timeout=30,
            trust_env=False,
        )
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert served.node.get("/health")["status"] == "ok"


@needs("langchain_openai", "langchain-openai")
@pytest.mark.usefixtures("direct")
def test_langchain(served: ServedModel) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    common: dict[str, Any] = {"base_url": f"{served.node.url}/v1", "api_key": served.secret, "model": "neuroshard"}
    chat = ChatOpenAI(**common, max_tokens=6)
    assert chat.invoke("What is a list?").usage_metadata["output_tokens"] <= 6
    assert any(chunk.content for chunk in chat.stream("What is a list?"))
    assert isinstance(OpenAI(**common, max_tokens=6).invoke("A list"), str)


@needs("llm")
def test_llm(served: ServedModel, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: neuroshard\n  api_base: {served.node.url}/v1\n  api_key_name: node\n"
    )
    (tmp_path / "keys.json").write_text(json.dumps({"node": served.secret}))
    variables = {"LLM_USER_PATH": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "llm", "-m", "here", "-o", "max_tokens", "6", "Hello"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


TEXTS = [topics.topics[name][:400] for name in sorted(topics.topics)[:4]]


@needs("transformers", "'.[dev]'")
def test_the_node_scores_as_the_exported_folder_does(served: ServedModel) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(served.exported).eval()
    tokenizer = AutoTokenizer.from_pretrained(served.exported)
    here, there, count = 0.0, 0.0, 0
    for text in TEXTS:
        ids: list[int] = tokenizer(text)["input_ids"][: served.context]
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        there += sum(rows[place, target].item() for place, target in enumerate(ids[1:]))
        asked = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
        scores = served.node.post("/v1/completions", asked)["choices"][0]["logprobs"]["token_logprobs"]
        assert scores[0] is None
        here += sum(scores[1:])
        count += len(ids) - 1
    assert exp(-here / count) == pytest.approx(exp(-there / count), rel=1e-3)


@needs("lm_eval", "'lm-eval[api]' accelerate")
@pytest.mark.timeout(900)
def test_lm_eval_gives_the_perplexity_of_the_exported_folder(served: ServedModel, tmp_path: Path) -> None:
    """Its windows end one token earlier over HTTP, so the lengths differ by two."""
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "own_text.yaml").write_text(TASK.format(folder=tmp_path))
    url, folder = f"{served.node.url}/v1/completions", served.exported
    over_http = f"model=neuroshard,base_url={url},tokenizer={folder},max_length={served.context}"
    from_disk = f"pretrained={folder},dtype=float32,add_bos_token=False,max_length={served.context - 2}"
    found = [
        perplexities(tmp_path, "local-completions", over_http, {"OPENAI_API_KEY": served.secret}),
        perplexities(tmp_path, "hf", from_disk, {}),
    ]
    assert found[0]["byte_perplexity,none"] > 1
    assert found[0] == pytest.approx(found[1], rel=1e-3)


TASK = """task: own_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/texts.jsonl
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: byte_perplexity
  - metric: bits_per_byte
"""


def perplexities(folder: Path, kind: str, model: str, variables: Mapping[str, str]) -> dict[str, float]:
    """Run lm-evaluation-harness without a network and return its measurements of the task."""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", model, "--tasks", "own_text"]
    options = ["--include_path", str(folder), "--device", "cpu", "--output_path", str(folder / kind)]
    done = subprocess.run(
        [*command, *options], env={**os.environ, **offline, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    (report,) = (folder / kind).rglob("results*.json")
    measured = json.loads(report.read_text())["results"]["own_text"]
    return {name: value for name, value in measured.items() if isinstance(value, float)}
