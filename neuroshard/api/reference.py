"""Tables of the API's values on a page of the documentation: `python -m neuroshard.api.reference docs/API.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from neuroshard.api.typescript import comment_of, response_schemas, type_of

# <!-- values of PeerStatus --> ... <!-- end of values -->: the text between is replaced by the table of that type.
TABLE: Final = re.compile(r"(<!-- values of (\w+) -->\n).*?(<!-- end of values -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """The page with every table replaced by the one that follows from the declarations.

    Raises KeyError if a table names a type that is in no response.
    """
    schemas = response_schemas()

    def replaced(found: re.Match[str]) -> str:
        return "\n".join([found[1], *members_table(schemas[found[2]], schemas), "", found[3]])

    return TABLE.sub(replaced, page)


def members_table(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a Markdown table with the members of an object."""
    yield "| member | type | meaning |"
    yield "| --- | --- | --- |"
    for name, part in schema["properties"].items():
        yield f"| `{name}` | {_type(part, schemas)} | {comment_of(part)} |"


def _type(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """The type in words; a choice is shown with its values."""
    words: list[str] = []
    for case in schema.get("anyOf", [schema]):
        name = type_of(case)
        values = schemas.get(name, {}).get("enum")
        words += [", ".join(f"`{value}`" for value in values)] if values else name.split(" | ")
    return " or ".join(dict.fromkeys(words))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
