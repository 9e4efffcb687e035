"""The guide to a first public run, typed word for word by an organiser and a stranger with folders of their own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.node_process import free_port
from tests.docs.test_documented_commands import FOLLOWED, blocks_of, environment_of, install_program
from tests.worlds.processes import until

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("bash") is None or shutil.which("curl") is None,
        reason="the guide speaks of bash, curl and Linux' folders",
    ),
]
LONGEST_SECONDS = 300.0
HERE_ONLY = {"NEUROSHARD_PORT", "NEUROSHARD_P2P_HOST"}  # several computers are one here, and it must stay alone
ORGANISER_TOKEN, STRANGER_TOKEN = "0a" * 32, "0b" * 32


@dataclass(frozen=True)
class Person:
    """Somebody with an own home folder and wallet, and nothing else."""

    home: Path
    token: str
    place: str = ""  # network namespace of the computer; empty: the one of the tests
    variables: Mapping[str, str] = field(default_factory=dict[str, str])  # of the environment

    @property
    def environment(self) -> dict[str, str]:
        """That of the commands which this person types. A computer in a place of its own has the usual ports."""
        made = environment_of(self.home, self.token)
        if self.place:
            made = {name: value for name, value in made.items() if name not in HERE_ONLY} | {"NO_PROXY": "*"}
        return made | dict(self.variables)

    def command(self, *arguments: str) -> list[str]:
        """A command that starts bash on this person's computer."""
        enter = ["ip", "netns", "exec", self.place] if self.place else []
        return [*enter, "bash", *arguments]

    def types(self, text: str) -> str:
        """Type commands and wait for their end; what they print."""
        ran = subprocess.run(
            self.command("-euo", "pipefail", "-c", text),
            cwd=self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
        )
        assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    @contextmanager
    def leaves_running(self, text: str, log: str) -> Iterator[Path]:
        """Type a command in a terminal that stays open; the file with what it prints."""
        file = self.home / log
        with file.open("w") as output:
            process = subprocess.Popen(
                self.command("-c", f"exec {text.strip()}"),
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield file
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def person(home: Path, token: str, place: str = "") -> Person:
    """A person whose computer has only the program."""
    install_program(home, fresh=bool(place))  # a fork would be on this computer
    return Person(home, token, place)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def addresses(someone: Person) -> list[str]:
    """Addresses that `neuroshard status` shows; none before the node answers."""
    ran = subprocess.run(
        someone.command("-c", "neuroshard status --json"),
        env=someone.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return list(json.loads(ran.stdout)["network"]["addresses"]) if ran.returncode == 0 else []


def test_an_organiser_and_a_stranger_follow_the_guide(small_text: Path, tmp_path: Path) -> None:
    page = FOLLOWED.read_text(encoding="utf-8")
    create, node, organise, join, watch, allow, change, take_home = (block.text for block in blocks_of(FOLLOWED))
    organiser, stranger = person(tmp_path / "organiser", ORGANISER_TOKEN), person(tmp_path / "other", STRANGER_TOKEN)
    shutil.copytree(small_text, organiser.home / "my-texts")
    (config,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (organiser.home / "run.toml").write_text(config)
    assert "plan" in page
    organiser.types("neuroshard run plan run.toml")

    said = organiser.types(create)
    (run,) = re.findall(r"Signed: run ([0-9a-f]{64})", said)
    port = free_port()
    words = {"RUN": run, "URL": f"http://127.0.0.1:{port}", "http://127.0.0.1:8800": f"http://127.0.0.1:{port}"}

    def typed(text: str, **more: str) -> str:
        for word, meaning in (words | more).items():
            text = re.sub(rf"(?<![A-Z_]){word}(?![A-Z_])", meaning, text)
        return text

    assert typed(organise).strip() in said  # the commands that `run create` printed
    assert f"neuroshard --run {run} --organiser URL" in said
    assert "--peer" not in page.split("## 4.")[1].split("## 5.")[0]
    with ExitStack() as running:
        running.enter_context(organiser.leaves_running(typed(node), "node.log"))
        until("an address", lambda: bool(addresses(organiser)), LONGEST_SECONDS)
        listen = f"{typed(organise).strip()} --listen 127.0.0.1:{port}"  # 8800 may be in use on this computer
        running.enter_context(organiser.leaves_running(listen, "organiser.log"))
        until("the organiser", lambda: is_up(words["URL"]), LONGEST_SECONDS)
        log = running.enter_context(stranger.leaves_running(typed(join), "node.log"))

        def shown() -> dict[str, Any]:
            facts, _, _ = organiser.types(typed(watch)).partition("}{")
            found: dict[str, Any] = json.loads(facts + "}")
            return found

        def is_shared() -> bool:
            return shown()["participants_ever"] == 2

        try:
            until("certified work of both", is_shared, LONGEST_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log.read_text()}\n{shown()}") from error
        assert shown()["pflop_total"] > 0
        wallet = json.loads(stranger.types("neuroshard wallet show --json"))["wallet_id"]
        organiser.types(typed(allow, WALLET=wallet))
        assert "inner_lr" in organiser.types(typed(change))
        stranger.types(typed(take_home))
        assert {"config.json", "model.safetensors"} <= {path.name for path in (stranger.home / "model").iterdir()}
