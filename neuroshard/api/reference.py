"""Tables of the API's values on a page of the documentation: `python -m neuroshard.api.reference docs/API.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from neuroshard.api.typescript import comment_of, references, response_schemas, type_of

# <!-- values of PeerStatus --> ... <!-- end of values -->: the text between is replaced by the table of that type.
TABLE: Final = re.compile(r"(<!-- values of (\w+) -->\n).*?(<!-- end of values -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """The page with every table replaced by the one that follows from the declarations.

    Raises KeyError if a table names a type that is in no response, ValueError if it uses a type without a table.
    """
    schemas = response_schemas()
    defined = {found[2] for found in TABLE.finditer(page)}

    def replaced(found: re.Match[str]) -> str:
        schema = schemas[found[2]]
        objects = {name for name in references(schema["properties"]) if "properties" in schemas[name]}
        if objects - defined:
            raise ValueError(f"{found[2]} uses types that have no table on the page: {sorted(objects - defined)}")
        return "\n".join([found[1], *members_table(found[2], schema, schemas), "", found[3]])

    return TABLE.sub(replaced, page)


def members_table(name: str, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown: the name and meaning of an object, and a table of its members."""
    yield f"`{name}`: {schema['description']}"
    yield ""
    yield "| member | type | meaning |"
    yield "| --- | --- | --- |"
    for member, part in schema["properties"].items():
        cells = (f"`{member}`", type_in_words(part, schemas), comment_of(part))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def type_in_words(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """The type of a member: a choice is shown with its values, an object with the name of its table."""
    match schema:
        case {"anyOf": [*cases]}:
            return " or ".join(dict.fromkeys(type_in_words(case, schemas) for case in cases))
        case {"enum": [*values]}:
            return ", ".join(f"`{value}`" for value in values)
        case {"$ref": str(path)}:
            name = path.rpartition("/")[2]
            return f"`{name}`" if "properties" in schemas[name] else type_in_words(schemas[name], schemas)
        case {"type": "array", "items": item}:
            of = type_in_words(item, schemas)
            return f"list of {of}s" if of.isalpha() else f"list of {of}"
        case {"type": "object", "additionalProperties": {**item}}:
            return f"object: {type_in_words(item, schemas)} by name"
        case _:
            return type_of(schema)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
