"""YAML as the file of a run may use it: plain values only, no name twice, and 1e-4 is a number."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, cast

import yaml

from neuroshard.types import JsonValue


class _Loader(yaml.SafeLoader):
    """The safe loader, made stricter about names and kinder about numbers."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[:60]} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-4 as text, because it has no dot.
_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def read_yaml(text: str) -> dict[str, JsonValue]:
    """The names and values of a document. Raises ValueError that says where it is wrong."""
    try:
        value: Any = yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in cast("dict[Any, Any]", value)):
        raise ValueError("names and values are needed")
    return cast("dict[str, JsonValue]", value)
