"""Terms that the project's prose avoids, and the sentences and names that are searched for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from source_files import ROOT, ours

UNITS = "second|minute|hour|day|month|step|token|line|node|file|page|parameter|layer|round|request|connection|peer"
COUNTED = r"(?:\d[\d.,]*\d|\d|one|two|three|ten|bytes|[KMG]i?B|Mbit|tokens|sequences|steps|requests|frames|calls)"
NO_COUNT = r"(?!(?:of|to|for|on|in|with|after|at|by|from|that|when|as)\b)"
START = r"(?<=[.;:!?|>(\"*¶] )"  # of a sentence, a passage, a table cell or the text of an element
AN_ELEMENT = r"(?:the|a|an|its|their|this|that|all|each|every|one) "

# Pattern in prose -> what to write. Code in backticks is no prose. Patterns see one space for any white space, and a
# paragraph sign before each comment, paragraph or string.
AVOID: dict[str, str] = {
    r"\b(?:goes|go|going|went|gone) on\b": "continue, resume",
    r"\b(?<!early to )(?:tell|tells|telling|told)\b(?! (?:\w+ ){1,4}apart)": "show, report, print, return, notify",
    r"\b(?:lies|lie|lay|lain|lying) (?:in|on|at|under|below|beside|between|there|next)\b": "is in",
    r"\b(?:stands|stand|stood) (?:in|on|at|under|below|beside|between|there|next)\b": "is in",
    r"\banew\b": "again",
    r"\blikewise\b": "also",
    r"\b(?:beside|besides)\b": "next to, in addition to",
    r"\bwho(?:ever|mever)\b": "any node that",
    r"\bso (?:many|long)\b(?! that)": "the number or the time itself",
    r"\bas far as\b": "the number or the condition itself",
    r"\bshall\b": "must, will",
    r"\b(?:mend|mends|mended|mending)\b": "fix, repair",
    r"\b(?:lack|lacks|lacked|lacking)\b": "not have, miss",
    r"[;,] else\b(?! (?:if|echo|return)\b| [\w. ]+\()": "otherwise",
    rf"\b{COUNTED} (?:{NO_COUNT}\w+ )?an? (?:{UNITS})\b": "per",
    r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|better\b|worse\b)": "is not a",
    rf"{START}(?:Who|What) [^.;?\"<>|¶]*[.;]": "a noun as the subject",
    rf"{START}(?:Of {AN_ELEMENT}[^.,;¶]*[.;]|Those of [^.,;¶]*[.;]|That of [^.,;¶]*[.;])": "a noun before the genitive",
    r"(?<=¶ )(?:See `?[\w.]+`?[.:;]|Once\.)": "a sentence that says it",
}

# Part of a name (split at case and underscores) -> the field's term.
REPLACED: dict[str, str] = {
    "gathering": "matchmaking",
    "society": "peer network",
    "acquaintance": "known peer",
    "acquaintances": "known peers",
    "kindness": "owner policy",
    "obedient": "throttle",
    "greeter": "handshake",
    "hello": "handshake",
    "departures": "failure detector",
    "shelf": "data store",
    "giver": "server",
    "givers": "servers",
    "asker": "client, requester",
    "askers": "requesters",
    "journal": "in-flight ledger",
    "journaled": "write-ahead",
    "tell": "report, notify, send",
    "told": "reported",
    "unrest": "pending relocation",
    "forgiven": "expired, cleared",
    "passage": "trace, sequence",
    "passages": "traces, sequences",
}
# Names that others choose: Python's files.
NOT_OURS_TO_CHOOSE = {
    "neuroshard/data/shard_file.py": {"tell"},
}

FOLDERS = ("neuroshard", "installers", "docs", "web/src")
ENDINGS = {".py", ".md", ".ts", ".tsx", ".css", ".sh", ".nsi", ".1", ".desktop", ".service", ".conf"}
TEXT_OF_PYTHON = re.compile(
    r'(?P<prefix>\b[rbfRBF]{1,2})?(?P<quoted>"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
    r"|(?P<comment>#[^\n]*(?:\n[ \t]*#[^\n]*)*)",
    re.DOTALL,
)
CODE_IN_MARKDOWN = re.compile(r"```.*?\n.*?```|`[^`]+`|<[^>\n]+>|\]\([^)]*\)", re.DOTALL)
PARAGRAPHS = re.compile(r"\n(?=[ \t]*(?:\n|[-*|>#] |##|\d+\. ))")
COMMENT_OR_CODE = re.compile(
    r"/\*.*?\*/|(?:^[ \t]*(?://|#|;)[^\n]*\n?)+|.+?(?=/\*|^[ \t]*(?://|#|;)|\Z)", re.DOTALL | re.M
)
COMMENT_SIGNS = re.compile(r"^[ \t]*(?:#+|//|/?\*+|;|-|\||\d+\.)(?=\s)", re.M)
NAME = re.compile(r"\b[A-Za-z_]\w+")
WORDS_OF_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
PATTERNS = [(re.compile(text, 0 if START in text else re.IGNORECASE), write) for text, write in AVOID.items()]


def prose_files() -> list[Path]:
    """Sources and documents that the rules of prose apply to, and every file of the installers that we wrote."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    found += [path for path in (ROOT / "installers").rglob("*") if path.parent.name not in {"locks", "licences"}]
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "web/index.html", "hatch_build.py")]
    return [path for path in sorted({*found, *top}) if path.is_file() and ours(path)]


def hits_in_prose(name: str, text: str) -> list[str]:
    """Phrases of the table in the prose of a file: the line, the phrase, and what to write."""
    pieces = list(passages(name, text))
    words = "".join(f"¶ {' '.join(prose.split())} " for _, prose in pieces)
    return [
        f"{name}:{line_of(hit.start(), words, pieces, text)}: {hit[0].strip()!r}: write {write}"
        for pattern, write in PATTERNS
        for hit in pattern.finditer(words)
    ]


def hits_in_names(name: str, text: str) -> list[str]:
    """Names in the code of a Python file that have a replaced word."""
    code = TEXT_OF_PYTHON.sub("", text)
    return [
        f"{name}: name {found}: write {REPLACED[word.lower()]}"
        for found in sorted(set(NAME.findall(code)) - NOT_OURS_TO_CHOOSE.get(name, set()))
        for word in WORDS_OF_NAME.findall(found)
        if word.lower() in REPLACED
    ]


def passages(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Each paragraph, comment or sentence in a string, with the place where it begins."""
    if name.endswith(".py"):
        yield from passages_of_python(text)
    elif name.endswith(".md"):
        text = "\n## ".join(text.split("\n## ")[:2]) if name == "CHANGELOG.md" else text  # a release is history
        text = CODE_IN_MARKDOWN.sub(without_words, text)
        place = 0
        for paragraph in PARAGRAPHS.split(text):
            yield place, COMMENT_SIGNS.sub("", paragraph)
            place += len(paragraph) + 1
    else:
        for found in COMMENT_OR_CODE.finditer(text):
            yield found.start(), COMMENT_SIGNS.sub("", found[0])


def passages_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and sentences in strings; strings that are written next to each other are one."""
    start, end, joined = 0, 0, ""
    for found in TEXT_OF_PYTHON.finditer(text):
        if found["comment"]:
            yield found.start(), CODE_IN_MARKDOWN.sub(without_words, COMMENT_SIGNS.sub("", found[0]))
        elif "r" not in (found["prefix"] or "").lower():
            if text[end : found.start()].strip():
                if " " in joined or joined.endswith("."):
                    yield start, joined
                start, joined = found.start(), ""
            quoted = found["quoted"].strip("\"'")
            quoted = re.sub(r"\{[^{}]*\}", "X", quoted) if found["prefix"] else quoted
            joined, end = joined + CODE_IN_MARKDOWN.sub(without_words, quoted), found.end()
    if " " in joined or joined.endswith("."):
        yield start, joined


def line_of(place: int, words: str, pieces: list[tuple[int, str]], text: str) -> int:
    """Line of a file's text at which a place in its words is."""
    start, prose = pieces[words.count("¶", 0, place + 1) - 1]
    in_passage = words.count(" ", words.rindex("¶", 0, place + 1), place) - 1
    before = [*re.finditer(r"\S+", prose)][in_passage].start()
    return text.count("\n", 0, start) + prose.count("\n", 0, before) + 1


def without_words(code: re.Match[str]) -> str:
    """A placeholder for code, with its line breaks."""
    return "`X`" + "\n" * code[0].count("\n")
