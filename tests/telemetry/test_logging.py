"""What reaches stderr, the file and the ring, and that secrets never do."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.errors import StorageError
from neuroshard.telemetry.logs import ConfiguredLogging, LogRing, configure_logging
from neuroshard.telemetry.redaction import Redactor

PHRASE = "abandon ability able about above absent absorb abstract absurd abuse access accident"
API_SECRET = "f3b1c5d7e9a0b2c4"
log = logging.getLogger("neuroshard.training.trainer")


class Output:
    """A configured logging and everything it wrote."""

    def __init__(self, folder: Path, *, json_lines: bool = False) -> None:
        self.stream = io.StringIO()
        self.ring = LogRing()
        self.file = folder / "logs" / "node.log"
        self.configured: ConfiguredLogging = configure_logging(
            as_json=json_lines,
            ring=self.ring,
            folder=folder / "logs",
            redactor=Redactor(PHRASE, API_SECRET),
            stream=self.stream,
        )

    def everything(self) -> str:
        lines = "\n".join(line.message for line in self.ring.after(0))
        return f"{self.stream.getvalue()}\n{self.file.read_text()}\n{lines}"


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    made = Output(tmp_path)
    yield made
    made.configured.close()


@pytest.fixture
def json_output(tmp_path: Path) -> Iterator[Output]:
    made = Output(tmp_path, json_lines=True)
    yield made
    made.configured.close()


def raise_with(secret: str) -> None:
    raise ValueError(f"wrong token {secret}")


def test_secrets_are_gone_from_message_arguments_traceback_and_extras(output: Output) -> None:
    log.info("starting with %s", PHRASE)
    log.info("starting with " + PHRASE.upper().replace(" ", "\n"))
    log.warning("header %r", {"Authorization": "Bearer abc.def-123"}, extra={"secret_extra": [API_SECRET]})
    log.info("GET /x?token=opensesame&y=1 --token 'open sesame too' NEUROSHARD_TOKEN=another")
    try:
        raise_with(PHRASE)
    except ValueError:
        log.exception("failed for %s", API_SECRET)
    text = output.everything()
    for secret in (PHRASE, "abandon", API_SECRET, "abc.def-123", "opensesame", "sesame too", "another"):
        assert secret not in text
    assert text.count("ValueError: wrong token [secret]") == 3
    assert "y=1" in text


def test_every_line_goes_to_stderr_file_and_ring(output: Output) -> None:
    log.info("step %d", 7)
    log.debug("hidden")
    logging.getLogger("uvicorn.error").info("hidden too")
    logging.getLogger("uvicorn.error").warning("odd request")
    console = output.stream.getvalue().splitlines()
    assert console[0].endswith(" training: step 7")
    assert console[1].endswith(" WARNING uvicorn: odd request")
    assert len(console) == 2
    assert [line.message for line in output.ring.after(0)] == ["step 7", "odd request"]
    assert len(output.file.read_text().splitlines()) == 2
    assert output.file.stat().st_mode & 0o777 == 0o600


def test_json_lines_hold_extras_and_null_for_what_is_not_finite(json_output: Output) -> None:
    log.warning("loss", extra={"loss": float("nan"), "step": 3, "where": Path("/x")})
    fields = json.loads(json_output.stream.getvalue())
    assert fields["message"] == "loss"
    assert (fields["loss"], fields["step"], fields["where"], fields["level"]) == (None, 3, "/x", "WARNING")


def test_a_line_with_wrong_arguments_is_kept(output: Output) -> None:
    log.warning("one %d two", "x")
    assert "one %d two" in output.everything()


def test_verbose_applies_at_once(output: Output) -> None:
    output.configured.set_verbose(True)
    log.debug("now seen")
    output.configured.set_verbose(False)
    log.debug("not seen")
    assert [line.message for line in output.ring.after(0)] == ["now seen"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which only Linux has")
def test_a_full_disk_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "node.log").symlink_to("/dev/full")
    stream, ring = io.StringIO(), LogRing()
    configured = configure_logging(ring=ring, folder=tmp_path, stream=stream)
    log.info("a line")
    log.info("another")
    assert configured.failed_writes() == 2
    configured.close()
    assert "a line" in stream.getvalue()
    assert [line.message for line in ring.after(0)] == ["a line", "another"]


def test_an_unusable_log_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    before = list(logging.getLogger().handlers)
    with pytest.raises(StorageError):
        configure_logging(folder=tmp_path / "logs")
    assert logging.getLogger().handlers == before


def test_short_secrets_are_replaced_as_whole_words_only() -> None:
    redactor = Redactor("abc", "")
    assert redactor.clean("abc abcd (abc) xabc") == "[secret] abcd ([secret]) xabc"
    redactor.add("longer-secret")
    assert redactor.clean("xxlonger-secretxx") == "xx[secret]xx"


@given(prefix=st.text(max_size=20), suffix=st.text(max_size=20), secret=st.text(min_size=8, max_size=40))
def test_a_registered_secret_never_comes_through(prefix: str, suffix: str, secret: str) -> None:
    cleaned = Redactor(secret).clean(prefix + secret + suffix)
    assert not secret.strip() or secret in "[secret]" or secret not in cleaned.replace("[secret]", "")


def test_ring_is_bounded_and_numbers_have_no_gaps() -> None:
    ring = LogRing(capacity=3)
    assert ring.after(0) == ()
    for number in range(1, 6):
        ring.append(0.0, "INFO", "x", f"{number}" * (10_000 if number == 5 else 1))
    assert [line.sequence for line in ring.after(0)] == [3, 4, 5]
    assert [line.sequence for line in ring.after(3, limit=1)] == [4]
    assert ring.after(5) == ring.after(99) == ring.after(0, limit=0) == ()
    assert [line.sequence for line in ring.newest(2)] == [4, 5]
    assert len(ring.after(4)[0].message) < 8_100


def test_ring_keeps_every_line_of_many_threads() -> None:
    ring = LogRing(capacity=10_000)

    def write(name: str) -> None:
        for number in range(500):
            ring.append(0.0, "INFO", name, str(number))

    threads = [threading.Thread(target=write, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = ring.after(0, limit=10_000)
    assert [line.sequence for line in lines] == list(range(1, 2001))
    assert [line.message for line in lines if line.logger == "2"] == [str(n) for n in range(500)]
