"""The template that makes one text of a conversation: node, exported folder and Modelfile use the same.

The model is trained on plain text and knows no roles, so the template is a plain script, one message per line:

    System: Answer in one sentence.
    User: What is a shard?
    Assistant: A part of the training data.
    User: How large is it?
    Assistant:
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

REPLY: Final = "Assistant:"  # the model continues after this
STOPS: Final = ("\nUser:", "\nSystem:", "\nAssistant:")  # the model has begun to write the other's part

JINJA: Final = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
OLLAMA: Final = (
    '{{ range .Messages }}{{ if eq .Role "system" }}System{{ else if eq .Role "user" }}User{{ else }}Assistant'
    "{{ end }}: {{ .Content }}\n{{ end }}Assistant:"
)


def conversation_text(messages: Iterable[tuple[str, str]]) -> str:
    """Text of the messages (role, content) that ends where the next reply begins; roles are in lower case."""
    return "".join(f"{role.capitalize()}: {content.strip()}\n" for role, content in messages) + REPLY
