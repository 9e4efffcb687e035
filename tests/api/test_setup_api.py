"""The wizard's routes: who may call them, what they refuse, and that nothing is stored before the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuroshard.api.access import ENTRY_SECONDS, SessionKeys
from neuroshard.config.saving import stored_token
from neuroshard.errors import StorageError
from neuroshard.identity import Wallet, new_phrase, parse_token
from neuroshard.identity.invitations import (
    InvitationTerms,
    InvitedModel,
    InvitedPlaces,
    invite,
    to_code,
)
from neuroshard.network.mdns import RunNotice
from neuroshard.runs.chosen_run import ChosenRun
from neuroshard.types import RunId
from tests.worlds.claims import identity_of
from tests.worlds.setup_api import HERE, PORT, SECRET, SetupApi

PHRASE = "legal winner thank year wave sausage worth useful legal winner thank yellow"
PEER = f"/dns/node.example.org/tcp/4001/p2p/{identity_of(1).node_id}"
WRONG = "legal winner thank year wave sausage worth useful legal winner thank thank"


@pytest.fixture
def wizard(tmp_path: Path) -> SetupApi:
    return SetupApi(tmp_path / "node")


def key_of(wizard: SetupApi) -> str:
    return SessionKeys(SECRET, PORT).new_entry_key(wizard.now, ENTRY_SECONDS)


def test_nobody_reads_or_changes_anything_without_the_secret(wizard: SetupApi) -> None:
    paths = wizard.app.openapi()["paths"]
    assert {"/api/setup", "/api/setup/wallet", "/api/setup/finish"} <= set(paths)
    for path, methods in paths.items():
        for method in methods:
            answer = wizard.call(method.upper(), path, {}, HERE)
            allowed = path == "/health" or (method, path) == ("post", "/api/session")
            assert answer.status_code == 401 or allowed, (method, path, answer.status_code)
    read_token = {"Authorization": f"Bearer {SessionKeys(SECRET, PORT).read_token}"}
    for path in ("/api/setup", "/api/session", "/api/training/verify", "/nothing"):
        for headers in (HERE, read_token):  # a program that reads the node's numbers must not read a new wallet
            assert wizard.call("GET", path, headers=headers).status_code == 401, path
    assert wizard.call("GET", "/").status_code == 200
    assert wizard.stopped == []


def test_a_foreign_page_is_refused_even_with_the_secret(wizard: SetupApi) -> None:
    bearer = {"Authorization": f"Bearer {SECRET}"}
    for foreign in ({"Host": "evil.example:8000"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert wizard.call("GET", "/api/setup", headers=bearer | foreign).status_code == 403, foreign


def test_a_key_opens_one_session_and_then_no_more(wizard: SetupApi) -> None:
    key = key_of(wizard)
    opened = wizard.call("POST", "/api/session", {"secret": key}, HERE)
    assert opened.json()["setup"] is True
    cookie = {"Cookie": opened.headers["set-cookie"].partition(";")[0]}
    assert "HttpOnly" in opened.headers["set-cookie"]
    assert wizard.call("GET", "/api/setup", headers=HERE | cookie).status_code == 200
    command = HERE | cookie | {"X-NeuroShard-CSRF": opened.json()["csrf_token"]}
    assert wizard.call("POST", "/api/setup/wallet", {"source": "create"}, command).status_code == 200
    assert wizard.call("POST", "/api/setup/wallet", {"source": "create"}, HERE | cookie).status_code == 403
    assert wizard.call("POST", "/api/session", {"secret": key}, HERE).status_code == 401


def test_old_forged_and_foreign_keys_open_nothing(wizard: SetupApi) -> None:
    old = key_of(wizard)
    expiry, nonce, seal = key_of(wizard).split(".")
    wizard.now += ENTRY_SECONDS
    later = str(int(expiry) + 600)
    for key in (old, f"{later}.{nonce}.{seal}", f"{later}.x.{'0' * 64}", "..", "é.é.é", "x" * 200):
        assert wizard.call("POST", "/api/session", {"secret": key}, HERE).status_code == 401, key
    other = SessionKeys("another-secret-that-is-long-enough-too", PORT).new_entry_key(wizard.now, ENTRY_SECONDS)
    assert wizard.call("POST", "/api/session", {"secret": other}, HERE).status_code == 401


def test_a_new_wallet_is_shown_until_its_words_were_given_back(wizard: SetupApi) -> None:
    made = wizard.owner("POST", "/api/setup/wallet", {"source": "create"}).json()["wallet"]
    assert wizard.owner("GET", "/api/setup").json()["wallet"] == made  # a reload goes on with the same words
    words, asked = made["words"], made["asked"]
    assert (len(words), len(set(asked)), made["confirmed"]) == (12, 3, False)
    assert wizard.owner("POST", "/api/setup/finish").status_code == 422
    right = [words[place - 1] for place in asked]
    assert wizard.faults("/api/setup/backup", {"words": [right[0], "zebra", ""]}) == {
        "words.1": f"Word {asked[1]} is wrong.",
        "words.2": f"Word {asked[2]} is missing.",
    }
    assert set(wizard.faults("/api/setup/backup", {"words": []})) == {"words.0", "words.1", "words.2"}
    done = wizard.owner("POST", "/api/setup/backup", {"words": [f" {word.upper()} " for word in right]}).json()[
        "wallet"
    ]
    assert (done["confirmed"], done["words"]) == (True, [])
    assert Wallet.from_secret(parse_token(" ".join(words))).wallet_id == done["wallet_id"]
    assert wizard.owner("POST", "/api/setup/finish").status_code == 202
    ((first, autostart),) = wizard.stored
    assert (first.token.get_secret_value(), autostart) == (" ".join(words), False)
    assert not wizard.folder.exists()


def test_a_damaged_phrase_is_told_at_its_field(wizard: SetupApi) -> None:
    def fault(phrase: str) -> str:
        return wizard.faults("/api/setup/wallet", {"source": "enter", "phrase": phrase})["phrase"]

    assert "checksum" in fault(WRONG)
    assert "Word 3" in fault(PHRASE.replace("thank", "thankk", 1))
    assert "this one has 11" in fault(PHRASE.rpartition(" ")[0])
    assert "does not have exactly 64" in fault("ab" * 31)
    assert "this text has 3 words" in fault("correct horse battery")
    assert fault("") == "Enter the words of your wallet, or choose to make a new one."
    assert wizard.owner("GET", "/api/setup").json()["wallet"] is None
    short = {"source": "enter", "phrase": "abc", "is_text": True}
    assert "at least 8" in wizard.faults("/api/setup/wallet", short)["phrase"]
    text = wizard.owner("POST", "/api/setup/wallet", {**short, "phrase": "correct horse"}).json()["wallet"]
    assert "short or simple" in text["warning"]
    entered = wizard.owner("POST", "/api/setup/wallet", {"source": "enter", "phrase": f"  {PHRASE.upper()}\n"}).json()
    assert entered["wallet"]["wallet_id"] == Wallet.from_secret(parse_token(PHRASE)).wallet_id
    assert (entered["wallet"]["confirmed"], entered["wallet"]["words"]) == (True, [])


def test_choices_are_checked_one_by_one_and_kept(wizard: SetupApi, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("")
    wrong = {"memory": "much", "cpu_threads": 0, "max_upload": -1, "port": 1}
    faults = wizard.faults("/api/setup/choices", {"data_dir": "relative", "settings": wrong})
    assert set(faults) == {"data_dir", "memory", "cpu_threads", "max_upload", "port"}
    assert faults["cpu_threads"] == "Enter a whole number from 1 to 1,024, or leave the field empty."
    assert faults["max_upload"] == "Enter a number above 0 and at most 1,000,000,000, or leave the field empty."
    numbers = ("memory", "cpu_threads", "max_storage", "max_upload", "monthly_quota")
    for vast in ("1e99", 1e99, 10**99):
        assert set(wizard.faults("/api/setup/choices", {"settings": dict.fromkeys(numbers, vast)})) == set(numbers)
    for place, words in (
        (tmp_path / "file" / "x", "is a file"),
        (tmp_path / "full", "other files"),
        ("", "absolute path"),
    ):
        assert words in wizard.faults("/api/setup/choices", {"data_dir": str(place)})["data_dir"]
    wanted = {"data_dir": str(tmp_path / "big"), "settings": {"memory": 900, "training": False}, "autostart": True}
    chosen = wizard.owner("POST", "/api/setup/choices", wanted).json()
    assert (chosen["folder"]["path"], chosen["settings"]["memory"]["value"]) == (str(tmp_path / "big"), 900)
    assert (chosen["settings"]["memory"]["measured"], chosen["chosen"]) == (12_000, True)
    assert not (tmp_path / "big").exists()
    wizard.owner("POST", "/api/setup/wallet", {"source": "enter", "phrase": PHRASE})
    assert wizard.owner("POST", "/api/setup/finish", {}).json()["url"] == f"http://localhost:{PORT}"
    ((first, autostart),) = wizard.stored
    assert (first.data_dir, autostart) == (tmp_path / "big", True)
    assert first.settings == {"memory": 900, "training": False}


def test_what_a_flag_decides_is_not_asked(tmp_path: Path) -> None:
    wizard = SetupApi(tmp_path / "node", {"data_dir": tmp_path / "node", "memory": 700})
    shown = wizard.owner("GET", "/api/setup").json()
    assert (shown["folder"]["fixed_by"], shown["settings"]["memory"]["fixed_by"]) == ("--data-dir", "--memory")
    wizard.owner("POST", "/api/setup/choices", {"data_dir": str(tmp_path / "other"), "settings": {"memory": 5}})
    wizard.owner("POST", "/api/setup/wallet", {"source": "enter", "phrase": PHRASE})
    wizard.owner("POST", "/api/setup/finish", {})
    ((first, _),) = wizard.stored
    assert (first.data_dir, first.settings) == (tmp_path / "node", {})


def test_the_wallet_of_a_folder_is_found_and_never_replaced(wizard: SetupApi) -> None:
    phrase = new_phrase()
    (wizard.folder / "keys").mkdir(parents=True)
    (wizard.folder / "keys" / "wallet").write_text(phrase + "\n")
    wallet_id = Wallet.from_secret(parse_token(phrase)).wallet_id
    assert wizard.owner("GET", "/api/setup").json()["folder"]["wallet_id"] == wallet_id
    wizard.owner("POST", "/api/setup/wallet", {"source": "enter", "phrase": PHRASE})
    assert f"holds the wallet {wallet_id}" in wizard.faults("/api/setup/finish", {})["data_dir"]
    assert wizard.owner("POST", "/api/setup/wallet", {"source": "found"}).json()["wallet"]["origin"] == "found"
    assert wizard.owner("POST", "/api/setup/finish", {}).status_code == 202
    token = stored_token(wizard.folder)
    assert token is not None
    assert token.get_secret_value() == phrase


def test_what_cannot_be_stored_is_told_and_can_be_tried_again(wizard: SetupApi) -> None:
    wizard.owner("POST", "/api/setup/wallet", {"source": "enter", "phrase": PHRASE})
    wizard.failure = StorageError("The disk is full.", "Choose another one.")
    assert wizard.faults("/api/setup/finish", {}) == {"data_dir": "The disk is full. Choose another one."}
    wizard.failure = None
    assert wizard.owner("POST", "/api/setup/finish", {}).status_code == 202


def test_commands_for_a_node_hear_that_it_waits(wizard: SetupApi) -> None:
    answer = wizard.owner("GET", "/api/status")
    assert (answer.status_code, answer.json()["detail"]) == (503, "This node is waiting to be set up in the browser.")
    assert "opens it again" in answer.json()["action"]
    for command in ("/api/training/pause", "/v1/completions"):
        assert wizard.owner("POST", command, {}).status_code == 503
    assert wizard.call("GET", "/health").json() == {"status": "setup"}
    assert wizard.owner("POST", "/api/shutdown", {}).status_code == 202
    assert wizard.stopped == ["asked through the API"]


def test_a_page_that_was_closed_long_ago_is_given_up(wizard: SetupApi) -> None:
    wizard.beats = 1700.0
    wizard.owner("GET", "/api/setup")  # an open page asks all the time
    wizard.beats += 1799.0
    assert not wizard.desk.is_abandoned()
    wizard.beats += 2.0
    assert wizard.desk.is_abandoned()


def code_of(not_after: float, label: str = "Ada") -> str:
    owner = Wallet.from_secret(parse_token("ab" * 32))
    places = InvitedPlaces("friends", (PEER,), model=InvitedModel(124_000_000, 2, 900))
    return to_code(invite(owner, RunId("1" * 64), InvitationTerms(not_after, 2, label), places, seed=bytes(32)))


def test_an_invitation_is_shown_without_anything_that_lets_its_reader_join(tmp_path: Path) -> None:
    wizard = SetupApi(tmp_path / "node", is_given=False)
    assert wizard.owner("GET", "/api/setup").json()["arrival"]["purpose"] is None
    code = code_of(wizard.now + 100)
    wizard.owner("POST", "/api/setup/choices", {"settings": {"memory": 800, "max_upload": 2}})
    read = wizard.owner("POST", "/api/setup/invitation", {"text": f"neuroshard://join/{code}\n"})
    shown = read.json()["arrival"]["invitation"]
    assert (shown["name"], shown["label"], shown["uses"], shown["nodes"]) == ("friends", "Ada", 2, 1)
    assert (shown["not_after"], shown["gb_per_day"]) == (1_100, pytest.approx(21.6))
    assert shown["model"] == {"parameters": 124_000_000, "stages": 2, "stage_mb": 900, "fits": False}
    assert len(shown["inviter_words"].split()) == 4
    assert code[10:80] not in read.text
    assert wizard.owner("POST", "/api/setup/finish", {}).status_code == 422
    wizard.owner("POST", "/api/setup/wallet", {"source": "enter", "phrase": PHRASE})
    assert "not yet chosen" in wizard.owner("POST", "/api/setup/finish", {}).json()["detail"]
    assert wizard.owner("POST", "/api/setup/purpose", {"purpose": "join"}).json()["arrival"]["purpose"] == "join"
    assert wizard.owner("POST", "/api/setup/finish", {}).status_code == 202
    (run,) = wizard.runs
    assert run is not None
    assert run.code == code


def test_a_link_that_is_opened_answers_no_question(tmp_path: Path) -> None:
    wizard = SetupApi(tmp_path / "node", is_given=False)
    wizard.owner("POST", "/api/setup/invitation", {"text": code_of(wizard.now + 100)})
    wizard.owner("POST", "/api/setup/purpose", {"purpose": "join"})
    assert wizard.owner("POST", "/api/link", {"text": code_of(wizard.now + 100, "Eve")}).status_code == 202
    arrival = wizard.owner("GET", "/api/setup").json()["arrival"]
    assert (arrival["purpose"], arrival["invitation"]["label"]) == (None, "Eve")  # Join must be pressed again
    assert wizard.owner("POST", "/api/link", {"text": "neuroshard://join/\0\u202e"}).status_code == 202
    arrival = wizard.owner("GET", "/api/setup").json()["arrival"]
    assert "Copy all of it" in arrival["link_fault"]
    assert wizard.call("POST", "/api/link", {"text": ""}, HERE).status_code == 401


def test_the_demo_starts_without_a_wallet(tmp_path: Path) -> None:
    wizard = SetupApi(tmp_path / "node", is_given=False, failure=StorageError("The disk is full.", "Free some space."))
    assert wizard.owner("POST", "/api/setup/demo", {}).status_code == 500
    wizard.failure = None
    assert wizard.owner("POST", "/api/setup/demo", {}).status_code == 202
    assert (wizard.demos, wizard.stored) == (1, [])


def test_a_run_of_the_local_network_is_listed_and_joined_by_its_id(tmp_path: Path) -> None:
    """No address of the announcement is stored: the node finds the run again, and believes its signed parameters."""
    wizard, run_id = SetupApi(tmp_path / "node", is_given=False), RunId("3" * 64)
    assert wizard.owner("GET", "/api/setup").json()["arrival"]["nearby"] == []
    unknown = {"purpose": "nearby", "run_id": run_id}
    assert "no longer on the local network" in wizard.faults("/api/setup/purpose", unknown)["run_id"]
    assert "run_id" in wizard.faults("/api/setup/purpose", {"purpose": "nearby"})
    wizard.nearby.hear([RunNotice(run_id, "home <b>", 2)], 0.0)
    row = {"run_id": run_id, "name": "home <b>", "computers": 2}
    assert wizard.owner("GET", "/api/setup").json()["arrival"]["nearby"] == [row]
    chosen = wizard.owner("POST", "/api/setup/purpose", unknown).json()["arrival"]
    assert (chosen["purpose"], chosen["nearby_run"]) == ("nearby", row)
    wizard.nearby.hear([], 1000.0)  # it leaves; the choice stays
    wizard.owner("POST", "/api/setup/wallet", {"source": "enter", "phrase": PHRASE})
    assert wizard.owner("POST", "/api/setup/finish").status_code == 202
    assert wizard.runs == [ChosenRun(run_id, "home <b>")]


def test_folders_are_listed_for_the_owner_only_and_nothing_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wizard, home = SetupApi(tmp_path / "node", is_given=False), tmp_path / "home"
    (home / "notes" / "old").mkdir(parents=True)
    (home / "notes" / "a.txt").write_text("text")
    monkeypatch.setenv("HOME", str(home))
    assert wizard.call("POST", "/api/setup/folders", {"path": None}, HERE).status_code == 401
    listed = wizard.owner("POST", "/api/setup/folders", {"path": None}).json()
    text = {"files": 1, "bytes": 4, "is_complete": True}
    assert (listed["folder"], listed["parent"]) == ({"path": str(home), **text}, str(tmp_path))
    assert listed["folders"] == [{"path": str(home / "notes"), **text}]
    named = wizard.owner("POST", "/api/setup/folders", {"path": "~/notes"}).json()
    assert named["folder"]["path"] == str(home / "notes")
    for path, words in {"notes": "whole path", str(home / "none"): "cannot be opened", "~\0": "NUL"}.items():
        assert words in wizard.faults("/api/setup/folders", {"path": path})["path"]
    assert wizard.owner("GET", "/api/setup").json()["arrival"]["text"] is None
