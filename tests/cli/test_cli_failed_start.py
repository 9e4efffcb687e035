"""A start from a menu that fails shows what to do in the browser; one in a terminal, or without a desktop, does not."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from pathlib import Path
from urllib.request import urlopen

import pytest

from benchmarks.node_process import TOKEN
from neuroshard.cli.failure_page import failure_page, serve_once
from neuroshard.cli.failures import show_failure_on_desktop
from neuroshard.errors import StorageError
from neuroshard.host.desktop import Ancestor, has_terminal, is_own_window
from tests.worlds.commands import Command, Icon

PORT_WORDS = "is busy"


@pytest.fixture
def icon(neuroshard: Command) -> Icon:
    """A desktop's icon of NeuroShard, with a wallet."""
    return Icon(neuroshard.having(NEUROSHARD_TOKEN=TOKEN))


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port that another program has."""
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        yield int(other.getsockname()[1])


def is_readable(file: str) -> bool:
    try:
        Path(file).open("rb").close()
    except OSError:
        return False
    return True


def spoil(folder: Path, trouble: str) -> None:
    """Make a data folder of which no node can start."""
    if trouble == "a file":
        folder.write_text("in the way")
        return
    (folder / "keys").mkdir(parents=True)
    if trouble == "node key":
        (folder / "keys/node-key").write_bytes(b"damaged")
    else:
        (folder / "config.toml").write_text(trouble)


@pytest.mark.process
@pytest.mark.parametrize(
    ("trouble", "code", "words"),
    [
        ("a file", 5, ["config.toml cannot be read: Not a directory.", "Make it readable"]),
        ("node key", 5, ["node key", "damaged"]),
        ("memroy = 900\n", 2, ["memroy (line 1)", "Did you mean memory?"]),
        ("token_file = 'gone'\n", 3, ["The token file", "Check the path."]),
    ],
)
def test_what_to_do_is_shown(icon: Icon, tmp_path: Path, trouble: str, code: int, words: list[str]) -> None:
    folder = tmp_path / "a <b>folder"
    spoil(folder, trouble)
    chosen = icon.without("NEUROSHARD_TOKEN") if "token_file" in trouble else icon
    click = chosen.click("--port", "0", "--data-dir", folder)
    assert click.code == code, click.told
    page = click.pages[-1]  # behind the dashboard, when that was up already
    for word in words:
        assert word in page.text
        assert word in click.told
    assert f"{folder / 'config.toml'}" in page.text
    assert "<b>folder" not in page.html
    assert TOKEN not in page.html
    assert page.headers["cache-control"] == "no-store"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert re.findall(r"(?:src|href)=|url\(|<script", page.html) == []
    assert click.left_behind == []


@pytest.mark.process
def test_a_demo_and_a_first_run_tell_that_their_port_is_busy(icon: Icon, busy_port: int) -> None:
    for arguments in (["demo"], []):
        click = icon.without("NEUROSHARD_TOKEN").click(*arguments, "--port", busy_port)
        assert click.code == 4
        page = click.only_page
        assert PORT_WORDS in page.text
        assert "port = 8001" in page.text
        assert ("demo/config.toml" in page.text) is (arguments == ["demo"])


@pytest.mark.process
def test_no_page_where_somebody_reads_on_or_wants_none(icon: Icon, busy_port: int, tmp_path: Path) -> None:
    start = ["--port", busy_port, "--data-dir", tmp_path / "node"]
    no_pages = tmp_path / "no pages"
    no_pages.mkdir()
    (no_pages / "config.toml").write_text("browser = false\n")
    clicks = {
        "flag": icon.click(*start, "--headless"),
        "environment": icon.having(NEUROSHARD_BROWSER="false").click(*start),
        "file": icon.click(*start[:2], "--data-dir", no_pages),
        "another program": icon.click(*start, "--end-with-stdin"),
        "no desktop": icon.without("DISPLAY").click(*start),
        "a service": icon.as_service().click(*start),
        "over SSH, with its windows": icon.having(SSH_CONNECTION="192.0.2.1 5 192.0.2.2 22").click(*start),
        "a terminal": icon.in_terminal().click(*start),
    }
    for who, click in clicks.items():
        assert (who, click.code, click.pages) == (who, 4, [])
        assert PORT_WORDS in click.told


@pytest.mark.parametrize(
    ("place", "hindrance"),
    [
        ("socketserver.TCPServer.server_bind", OSError("Too many open files")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
        ("neuroshard.host.desktop.has_terminal", ValueError("I/O operation on closed file")),
    ],
)
def test_what_cannot_be_shown_is_told_all_the_same(
    place: str, hindrance: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise hindrance

    for name in ("SSH_CONNECTION", "SSH_TTY", "NEUROSHARD_BROWSER", "SYSTEMD_EXEC_PID", "XPC_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":9")
    monkeypatch.setenv("BROWSER", "true")
    monkeypatch.setattr("neuroshard.host.desktop.has_terminal", lambda: False)
    monkeypatch.setattr(place, fail)
    with pytest.raises(StorageError, match="The disk is full"), show_failure_on_desktop({"data_dir": tmp_path}):
        raise StorageError("The disk is full.")
    assert str(hindrance) in caplog.text


def test_a_closed_stream_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        closed = StringIO()
        closed.close()
        monkeypatch.setattr(sys, name, closed)
    assert has_terminal() is is_readable(os.ctermid())


def test_a_page_goes_to_who_knows_its_address_and_waits_no_longer_than_told() -> None:
    def read(address: str) -> None:
        with pytest.raises(OSError, match="404"):
            urlopen(address[:-1])
        with urlopen(address) as answer:
            read_pages.append(answer.read())

    read_pages: list[bytes] = []
    assert serve_once(b"what to do", read)
    assert read_pages == [b"what to do"]
    assert not serve_once(b"what to do", lambda _address: None, seconds=0.05)


def test_an_unforeseen_error_is_told_without_its_words() -> None:
    def fail() -> None:
        raise KeyError("legal winner thank year")

    with pytest.raises(KeyError) as unforeseen:
        fail()
    page = failure_page(unforeseen.value, None)
    assert "KeyError" in page
    assert "test_cli_failed_start.py" in page
    assert "winner" not in page
    assert "config.toml" not in page
    assert "&lt;i&gt;" in failure_page(StorageError("A <i>disk</i>."), None)


@pytest.mark.parametrize(
    ("above", "expected"),
    [
        ([("neuroshard.exe", ""), ("cmd.exe", '/c ""C:\\neuroshard.cmd" "'), ("explorer.exe", "")], True),
        ([("python.exe", ""), ("neuroshard.exe", ""), ("Explorer.EXE", "")], True),
        ([("neuroshard.exe", ""), ("cmd.exe", ""), ("explorer.exe", "")], False),
        ([("neuroshard.exe", ""), ("cmd.exe", "/C x"), ("powershell.exe", ""), ("explorer.exe", "")], False),
        ([("neuroshard.exe", ""), ("WindowsTerminal.exe", ""), ("explorer.exe", "")], False),
        ([("neuroshard.exe", ""), ("svchost.exe", "")], False),
        ([], False),
    ],
)
def test_a_window_of_windows_that_closes_with_us(above: list[tuple[str, str]], expected: bool) -> None:
    assert is_own_window([Ancestor(name, tuple(line.split())) for name, line in above]) is expected
