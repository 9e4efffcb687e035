"""Texts that accompany an exported model: the model card of a hub, and the Modelfile of Ollama."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from neuroshard.data.chat_template import OLLAMA, STOPS, conversation_text
from neuroshard.model.model_class import class_of

if TYPE_CHECKING:
    from neuroshard.data.tokenizer.table import TokenizerTable
    from neuroshard.state.checkpoint_catalogue import SavedStage

CARD_NAME = "README.md"  # the name that hubs show
EXAMPLE = (("system", "Answer in one sentence."), ("user", "What is a list?"))


def model_card(stages: Sequence[SavedStage], table: TokenizerTable | None, *, library: str) -> str:
    """Model card in Markdown. `library` is the name by which hubs find the program: transformers or gguf."""
    architecture, metas = stages[0].architecture, [stage.manifest.meta for stage in stages]
    loss = next((meta.loss_ema for meta in reversed(metas) if meta.loss_ema is not None), None)
    tokens = max(meta.tokens for meta in metas)  # a state from a run's nodes proves steps, but no tokens
    saved = datetime.fromtimestamp(min(meta.time for meta in metas), UTC)
    parts = ", ".join(f"layers {meta.layers.start}-{meta.layers.stop - 1}: {meta.step:,}" for meta in metas)
    steps = f"{metas[0].step:,}" if len(metas) == 1 else f"{min(meta.step for meta in metas):,} ({parts})"
    family = class_of(architecture).name.removesuffix("ForCausalLM")
    facts = {
        "Run": f"`{stages[0].run_id}`",
        "Training steps": steps,
        "Tokens seen": f"{tokens:,}" if tokens else "not known",
        "Training loss": "not known" if loss is None else f"{loss:.3f} nats per token (moving average)",
        "Saved": saved.strftime("%Y-%m-%d %H:%M UTC"),
        "Architecture": f"{family}: {architecture.layer_count} layers, width {architecture.hidden_size}, "
        f"{architecture.head_count} heads, {architecture.key_value_head_count} of keys and values",
        "Vocabulary": f"{architecture.vocabulary_size:,} ids" + (f", {table.next_merge_id:,} in use" if table else ""),
        "Context": f"{architecture.sequence_length:,} tokens",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    use = _TRANSFORMERS if library == "transformers" else _LLAMA_CPP
    script = conversation_text(EXAMPLE)
    return _CARD.format(library=library, rows=rows, use=use, script=script, name=f"run {stages[0].run_id[:12]}")


def modelfile(weights: str, sequence_length: int) -> str:
    """Modelfile of Ollama next to the file `weights`: `ollama create NAME -f MODELFILE`."""
    stops = "".join(f"PARAMETER stop {_quoted(stop)}\n" for stop in STOPS)
    return f'FROM ./{weights}\nTEMPLATE """{OLLAMA}"""\nPARAMETER num_ctx {sequence_length}\n{stops}'


def _quoted(text: str) -> str:
    return '"' + text.replace("\n", "\\n") + '"'


_CARD = """---
library_name: {library}
pipeline_tag: text-generation
tags:
- neuroshard
- base-model
---

# A model of the NeuroShard {name}

Several computers pre-train this language model together with NeuroShard. This is one
state of it, and training may continue. It is a base model: it continues text, it follows no instructions, and nobody
has checked what it writes.

| | |
| --- | --- |
{rows}

Its training text and its licence are those of the data set of the run: ask the owner of the run.

## Use

{use}

In a conversation, the messages become one script. The model continues it, and the reply ends where the model begins
the line of another role:

```text
{script}
```
"""
_TRANSFORMERS = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("this folder")
model = AutoModelForCausalLM.from_pretrained("this folder")
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)  # or any other text
ids = tokenizer(text, return_tensors="pt").input_ids  # adds the token that begins a text
print(tokenizer.decode(model.generate(ids, max_new_tokens=64)[0]))
```"""
_LLAMA_CPP = """```sh
llama-cli -m MODEL.gguf -p "The function returns"
ollama create my-model -f MODEL.Modelfile && ollama run my-model
```"""
