"""Rules of the project that no linter knows: names, pickle, broad handlers, words that must not leave a workplace."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from source_files import ROOT, name_of, python_files, syntax_tree, text_files, web_files
from typer.core import TyperGroup
from typer.main import get_command

from neuroshard.cli.main import app

EMPTY_NAMES = re.compile(r"(^|[_\-/])(utils?|helpers?|managers?)([_\-./]|$)|(Utils?|Helpers?|Manager)\b")
UNSAFE_READERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
# Task supervisor, API error handler, inbound-message handler, and the two ends of a thread boundary.
MAY_CATCH_EVERYTHING = {
    "neuroshard/api/middleware.py": "API error handler",
    "neuroshard/pipeline/executor.py": "carries the error to the caller's thread",
    "neuroshard/pipeline/compilation.py": "compilers fail in many ways, and training continues without them",
    "neuroshard/training/site/site.py": "any error of rank 0 leaves the other ranks waiting, and ends the site",
    "neuroshard/training/site/site_executor.py": "carries the error to the caller's thread",
    "neuroshard/training/site/worker.py": "any error of a rank ends its process, and the reason goes to rank 0",
    "neuroshard/state/checkpoint_saver.py": "carries the error to the caller's thread",
    "neuroshard/network/serving.py": "inbound-message handler",
    "neuroshard/network/libp2p/peer_limits.py": "inbound-message handler, for bytes that libp2p reads",
    "neuroshard/network/tasks.py": "task supervisor",
}
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
# Spelled in pieces, so that this file may be read too.
FORBIDDEN_WORDS = ("/" + "work/", "/" + "root/", "/tmp/" + "w/", "pypi-" + "more")


def test_no_name_says_nothing() -> None:
    named = [name_of(path) for path in (*python_files(), *web_files()) if EMPTY_NAMES.search(name_of(path))]
    classes = [
        f"{name_of(path)}: {node.name}"
        for path in python_files()
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.ClassDef) and EMPTY_NAMES.search(node.name)
    ]
    assert named + classes == []


def test_no_two_modules_of_tests_share_a_name() -> None:
    """They are imported by their bare names: the second one of a name would be the first."""
    names = Counter(path.name for path in python_files("tests") if path.name not in {"__init__.py", "conftest.py"})
    assert [name for name, count in names.items() if count > 1] == []


def test_structs_are_read_through_the_decoders_that_threads_may_share() -> None:
    """`neuroshard/decoders.py` says why the first use of a struct must not come from msgspec's own functions."""
    direct = re.compile(r"msgspec\.convert\((?!.*, analysed\()|msgspec\.(json|msgpack)\.(decode\(|Decoder\()")
    found = [name_of(path) for path in python_files("neuroshard") if direct.search(path.read_text(encoding="utf-8"))]
    assert found == ["neuroshard/decoders.py"]


def test_nothing_is_unpickled() -> None:
    found = [
        f"{name_of(path)}: {name}"
        for path in (*python_files("neuroshard", "benchmarks"), ROOT / "hatch_build.py")
        for name in imported_modules(path)
        if name.split(".")[0] in UNSAFE_READERS
    ]
    assert found == []


def test_broad_handlers_stand_only_at_the_edges() -> None:
    """A handler of everything that raises again only cleans up; any other one needs a place in the list."""
    found = {
        name_of(path)
        for path in python_files("neuroshard", "benchmarks")
        for handler in ast.walk(syntax_tree(path))
        if isinstance(handler, ast.ExceptHandler) and catches_everything(handler) and not raises_again(handler)
    }
    assert found - set(MAY_CATCH_EVERYTHING) == set()


def test_no_machine_shows_in_what_people_read() -> None:
    found = [
        f"{name_of(path)}: {word}"
        for path in text_files()
        for word in FORBIDDEN_WORDS
        if word in path.read_text(encoding="utf-8").lower()
    ]
    assert found == []


def test_the_lock_file_names_only_the_public_registry() -> None:
    text = (ROOT / "web/package-lock.json").read_text(encoding="utf-8")
    hosts = set(re.findall(r'"resolved": "https?://([^/"]+)/', text))
    assert hosts == {"registry.npmjs.org"}


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = {target for path in DOCUMENTS for target in make_targets(path)}
    assert {"demo", "test"} <= commands
    assert commands <= targets


def test_commands_in_the_documents_exist() -> None:
    """Every `neuroshard ...` of the documents, by the command line that really parses it."""
    lines = [line for path in DOCUMENTS for line in command_lines(path.read_text(encoding="utf-8"))]
    assert len(lines) > 20
    assert [f"{line}: {fault}" for line in lines if (fault := fault_of(line))] == []


def test_a_command_that_is_not_there_is_seen() -> None:
    text = "`neuroshard pause --fro 6`\n```sh\n.venv/bin/neuroshard demo --nodes=2  # --no\nneuroshard run maek\n```"
    assert [fault_of(line) for line in command_lines(text)] == ["no option --fro", "", "no command maek"]


def test_commands_for_a_demo_take_the_option_that_says_so() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Day to day")[1].split("add `--demo`")[0]
    lines = [line for line in command_lines(table) if line not in {"neuroshard demo", "neuroshard doctor"}]
    assert len(lines) > 7
    assert [line for line in lines if fault_of(f"{line} --demo")] == []


def test_dashboard_sources_name_no_other_host() -> None:
    """The dashboard loads and asks nothing outside the node that serves it."""
    allowed = {"www.w3.org", "127.0.0.1", "localhost"}
    found = {
        f"{name_of(path)}: {host}"
        for path in web_files()
        for host in re.findall(r"https?://([\w.-]+)", path.read_text(encoding="utf-8"))
        if host not in allowed
    }
    assert found == set()


def imported_modules(path: Path) -> Iterator[str]:
    """Names of all modules that a file imports."""
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def catches_everything(handler: ast.ExceptHandler) -> bool:
    """Whether a handler is bare or names Exception or BaseException."""
    names = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        name is None or (isinstance(name, ast.Name) and name.id in {"Exception", "BaseException"}) for name in names
    )


def raises_again(handler: ast.ExceptHandler) -> bool:
    """Whether the handler's last statement is a bare `raise`."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def command_lines(text: str) -> Iterator[str]:
    """What the code blocks and the code between the words of a document tell to type, from `neuroshard` on."""
    block = re.compile(r"```.*?\n(.*?)```", re.DOTALL)
    codes = [line for lines in block.findall(text) for line in lines.splitlines()]
    for code in (*re.findall(r"`([^`]+)`", block.sub("", text)), *codes):
        if match := re.match(r"(?:\S*[/\\])?(neuroshard\s.*)", code.replace("\n", " ")):
            yield match[1].strip()


def fault_of(line: str) -> str:
    """The command or option of a command line that does not exist; empty when all do."""
    command, words = get_command(app), shlex.split(line, comments=True)[1:]
    while words and not words[0].startswith("-") and isinstance(command, TyperGroup):
        word = words.pop(0)
        if word not in command.commands:
            return f"no command {word}"
        command = command.commands[word]
    known = {name for item in command.params for name in (*item.opts, *item.secondary_opts)} | {"--help", "-h"}
    unknown = [word for word in words if word.startswith("-") and word.partition("=")[0] not in known]
    return f"no option {unknown[0]}" if unknown else ""


def make_targets(path: Path) -> Iterator[str]:
    """Targets of the `make` commands in the code blocks of a document."""
    for block in re.findall(r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        yield from re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)
