"""One run of `neuroshard`, from a terminal or by a click on an icon, and its outcome.

Real: the process, its environment and its home folder. Simulated: the desktop, and the browser, which keeps the pages
that it is shown.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from benchmarks import preloaded

LONGEST_SECONDS = 100.0


@dataclass(frozen=True)
class Outcome:
    """Exit code and everything printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """What was printed for programs. Only JSON may stand on standard output then."""
        return json.loads(self.out)


@dataclass(frozen=True)
class Command:
    """Runs `neuroshard` with a home folder and variables of its own.

    On Linux the process is a fork that has imported everything, because imports are most of the work of a command. A
    `fresh` one imports for itself, as it does for a user.
    """

    home: Path
    variables: dict[str, str] = field(default_factory=dict[str, str])
    fresh: bool = False

    def environment(self) -> dict[str, str]:
        """What the process sees; nothing of NeuroShard comes from outside."""
        seen = ("NEUROSHARD_", "XDG_", "DISPLAY", "WAYLAND_DISPLAY", "SSH_")  # no desktop: nobody could answer a page
        kept = {key: value for key, value in os.environ.items() if not key.startswith(seen)}
        fixed = {"HOME": str(self.home), "COLUMNS": "200", "NO_COLOR": "1", "NEUROSHARD_P2P_HOST": "127.0.0.1"}
        return kept | fixed | self.variables

    def arguments(self, *arguments: object) -> list[str]:
        """The command line of the process."""
        return [sys.executable, "-m", "neuroshard", *map(str, arguments)]

    def __call__(self, *arguments: object) -> Outcome:
        """Run to the end."""
        self.home.mkdir(exist_ok=True)
        return outcome_of([*map(str, arguments)], self.environment(), fresh=self.fresh)

    def having(self, **variables: str) -> Command:
        """The same with more environment variables."""
        return replace(self, variables=self.variables | variables)


def outcome_of(
    arguments: Sequence[str], environment: Mapping[str, str], *, fresh: bool = False, script: Path | None = None
) -> Outcome:
    """Run `neuroshard`, or a script, to its end; nobody answers its questions. Raises subprocess.TimeoutExpired."""
    with TemporaryFile() as out, TemporaryFile() as err:
        if preloaded.is_wanted() and not fresh:
            process = preloaded.forker().start(arguments, environment, (out.fileno(), err.fileno()), script=script)
            try:
                code = process.wait(LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        else:
            command = [sys.executable, *(["-m", "neuroshard"] if script is None else [str(script)]), *arguments]
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            code = subprocess.run(command, env=environment, timeout=LONGEST_SECONDS, check=False, **streams).returncode
        out.seek(0)
        err.seek(0)
        return Outcome(code, out.read().decode(), err.read().decode())


BROWSER = """#!{python}
import json, sys, urllib.request
with urllib.request.urlopen(sys.argv[1]) as answer:
    page = dict(html=answer.read().decode(), headers=dict((k.lower(), v) for k, v in answer.headers.items()))
with open({shown!r}, "a") as file:
    file.write(json.dumps(page) + "\\n")
"""
AS_SERVICE = "import os, sys; os.environ['SYSTEMD_EXEC_PID'] = str(os.getpid()); os.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class Shown:
    """A page as the browser got it."""

    html: str
    headers: dict[str, str]

    @property
    def text(self) -> str:
        """What people read."""
        return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", self.html)).split()).replace(" .", ".")


@dataclass(frozen=True)
class Click:
    """What came of a click."""

    code: int
    told: str  # on the terminal that nobody sees
    pages: list[Shown]
    left_behind: list[str]  # in the folder for temporary files

    @property
    def only_page(self) -> Shown:
        """The one that was shown."""
        (page,) = self.pages
        return page


@dataclass(frozen=True)
class Icon:
    """An icon on a desktop with a home folder of its own."""

    command: Command
    removed: tuple[str, ...] = ()
    is_service: bool = False
    has_terminal: bool = False

    def having(self, **variables: str) -> Icon:
        """The same with more environment variables."""
        return replace(self, command=self.command.having(**variables))

    def without(self, variable: str) -> Icon:
        """The same without an environment variable."""
        return replace(self, removed=(*self.removed, variable))

    def as_service(self) -> Icon:
        """The same, started by systemd."""
        return replace(self, is_service=True)

    def in_terminal(self) -> Icon:
        """The same, started in a terminal, with its output in a file."""
        return replace(self, has_terminal=True)

    def click(self, *arguments: object) -> Click:
        """Start it and wait until it has ended."""
        home = self.command.home
        shown, temporary, output = home / "shown", home / "temporary", home / "output"
        temporary.mkdir(parents=True, exist_ok=True)
        shown.write_text("")
        browser = home / "browser"
        browser.write_text(BROWSER.format(python=sys.executable, shown=str(shown)))
        browser.chmod(0o755)
        wanted = {"DISPLAY": ":9", "BROWSER": str(browser), "TMPDIR": str(temporary)}
        environment = self.command.having(**wanted).environment()
        environment = {key: value for key, value in environment.items() if key not in self.removed}
        with output.open("wb") as file:
            if preloaded.is_wanted() and not (self.is_service or self.has_terminal or self.command.fresh):
                code = _fork([*map(str, arguments)], environment, file.fileno())
            else:
                line = self.command.arguments(*arguments)
                if self.is_service:
                    line = [sys.executable, "-c", AS_SERVICE, *line]
                code = (_run_in_terminal if self.has_terminal else _run)(line, environment, file.fileno())
        pages = [Shown(**json.loads(text)) for text in shown.read_text().splitlines()]
        return Click(code, output.read_text(), pages, sorted(path.name for path in temporary.iterdir()))


def _fork(arguments: list[str], environment: dict[str, str], output: int) -> int:
    process = preloaded.forker().start(arguments, environment, (output, output), has_session=True)
    try:
        return process.wait(LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def _run(line: list[str], environment: dict[str, str], output: int) -> int:
    ran = subprocess.run(
        line,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        timeout=LONGEST_SECONDS,
        check=False,
        start_new_session=True,  # no terminal controls it, though one may control these tests
    )
    return ran.returncode


def _run_in_terminal(line: list[str], environment: dict[str, str], output: int) -> int:
    import pty  # Windows has none

    child, terminal = pty.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDONLY)
        for stream, there in ((0, null), (1, output), (2, output)):
            os.dup2(there, stream)
        os.execve(line[0], line, environment)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(terminal)
