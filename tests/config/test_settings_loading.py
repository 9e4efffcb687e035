"""Where settings come from, which source wins, and what people are told about a wrong one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from neuroshard.config.folders import default_data_dir, prepare_data_dir
from neuroshard.config.loading import LoadedSettings, load_settings, read_token, resolve_data_dir
from neuroshard.config.settings import ALIASES, Applies, Settings, application_table, note_of
from neuroshard.errors import StorageError, TokenError, UsageError

SECRET = "correct horse battery staple"
NODE = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"


def loaded(
    folder: Path,
    flags: dict[str, object] | None = None,
    environment: dict[str, str] | None = None,
    config: str | None = None,
) -> LoadedSettings:
    if config is not None:
        (folder / "config.toml").write_text(config, encoding="utf-8")
    return load_settings(flags or {}, environment or {}, folder)


def test_each_source_wins_over_the_weaker_ones(tmp_path: Path) -> None:
    config = "port = 1\nmemory = 2\ncpu_threads = 3\n"
    environment = {"NEUROSHARD_PORT": "11", "NEUROSHARD_MEMORY": "12", "PATH": "/bin"}
    result = loaded(tmp_path, {"port": 21, "device": None}, environment, config)
    settings = result.settings
    assert (settings.port, settings.memory, settings.cpu_threads, settings.max_storage) == (21, 12, 3, 2000)
    assert [result.sources[key] for key in ("port", "memory", "cpu_threads", "max_storage", "device")] == [
        "flag",
        "environment",
        "config.toml",
        "default",
        "default",
    ]
    assert set(result.sources) == set(Settings.model_fields)


@pytest.mark.parametrize(
    ("flags", "environment", "config", "words"),
    [
        ({"prot": 1}, {}, "", ["flag: prot", "Did you mean port?"]),
        ({}, {"NEUROSHARD_MEMROY": "1"}, "", ["NEUROSHARD_MEMROY", "Did you mean memory?"]),
        ({}, {}, "cpu_thread = 2", ["config.toml: cpu_thread", "Did you mean cpu_threads?"]),
        ({}, {}, "dilocosteps = 2", ["dilocosteps", "Did you mean inner_steps?"]),
        ({}, {"NEUROSHARD_HEADLESS": "1"}, "", ["NEUROSHARD_HEADLESS", "browser = false"]),
        ({}, {"NEUROSHARD_P2PPORT": "1"}, "", ["NEUROSHARD_P2PPORT", "p2p_port?"]),
        ({}, {"NEUROSHARD_PEERS": "x"}, "", ["NEUROSHARD_PEERS", "Did you mean peer?"]),
        ({}, {"NEUROSHARD_NO_NETWORK": "1"}, "", ["NEUROSHARD_NO_NETWORK", "network = false"]),
        ({}, {}, "no_relay = true", ["no_relay", "relay = false"]),
        ({}, {}, "nope = 2", ["nope", "Valid are"]),
        ({}, {}, "zzzzzz = 2", ["zzzzzz", "Valid are", "max_storage"]),
        (
            {},
            {},
            'port = 1\nupdate_key = "ab"',
            ["update_key (line 2)", "no longer a setting: remove it. The root of trust"],
        ),
        ({}, {"NEUROSHARD_UPDATE_KEY": "ab"}, "", ["NEUROSHARD_UPDATE_KEY", "no longer a setting: remove it."]),
        ({}, {}, "[server]\nport = 1", ["config.toml has a table [server]"]),
        ({}, {}, "data_dir = '/x'", ["data_dir cannot be set in", "only as a flag"]),
        ({}, {}, "inner_steps = 1\ndiloco_steps = 2", ["inner_steps is given twice"]),
        ({"data_dir": ""}, {}, "", ["data_dir is empty"]),
    ],
)
def test_unknown_keys_name_the_key_and_the_nearest_valid_one(
    tmp_path: Path, flags: dict[str, object], environment: dict[str, str], config: str, words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, flags, environment, config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "environment", "config", "words"),
    [
        ({"port": 70_000}, {}, "", ["port", "--port", "70000", "0 to 65535"]),
        ({}, {"NEUROSHARD_PORT": "eight"}, "", ["NEUROSHARD_PORT", "'eight'", "0 to 65535"]),
        ({}, {}, "cpu_threads = 0", ["cpu_threads", "config.toml", "0", "1 to 1024"]),
        ({}, {}, "port = true", ["port", "config.toml", "True", "0 to 65535"]),
        ({}, {}, 'port = "80_00"', ["port", "config.toml", "80_00", "0 to 65535"]),
        ({}, {}, "port = 80.5", ["80.5"]),
        ({}, {}, "memory = []", ["memory", "megabytes"]),
        ({}, {}, "checkpoint_min_seconds = nan", ["checkpoint_min_seconds", "nan"]),
        ({"device": "tpu"}, {}, "", ["--device", "'tpu'", "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"]),
        ({"device": "cuda:x"}, {}, "", ["--device", "'cuda:x'", "where N counts from 0"]),
        ({}, {"NEUROSHARD_DEVICE": "cuda:-1"}, "", ["NEUROSHARD_DEVICE", "'cuda:-1'", "xpu:N"]),
        ({}, {}, "device = 'mps:1'", ["device", "config.toml", "'mps:1'"]),
        ({"genesis": "ftp://x"}, {}, "", ["--genesis", "'ftp://x'", "https://"]),
        ({"genesis": ""}, {}, "", ["--genesis", "a folder"]),
        ({"host": "http://x"}, {}, "", ["--host", "without port"]),
        ({}, {"NEUROSHARD_TRAINING": "maybe"}, "", ["NEUROSHARD_TRAINING", "'maybe'", "true or false"]),
        ({"port": -1, "memory": 0}, {}, "", ["--port", "--memory"]),
        ({"run": "ab" * 31}, {}, "", ["--run", "it has 62 characters", "64 hex digits"]),
        ({"run": "a"}, {}, "", ["--run", "it has 1 character)", "64 hex digits"]),
        ({}, {"NEUROSHARD_RUN": "xy" * 32}, "", ["NEUROSHARD_RUN", "other characters", "64 hex digits"]),
        ({"p2p_port": 65_536}, {}, "", ["--p2p-port", "0 to 65535"]),
        ({"p2p_host": "localhost"}, {}, "", ["--p2p-host", "IPv4 or IPv6 address", "loopback"]),
        ({}, {}, "max_upload = 0", ["max_upload", "config.toml", "more than 0"]),
        ({}, {}, "max_upload = inf", ["max_upload", "inf"]),
        ({}, {"NEUROSHARD_NETWORK": "maybe"}, "", ["NEUROSHARD_NETWORK", "'maybe'", "true or false"]),
        ({"peer": [NODE, "/ip4/192.0.2.7/tcp/4001"]}, {}, "", ["--peer", "'/ip4/192.0.2.7/tcp/4001' does not end"]),
        ({}, {"NEUROSHARD_PEER": f"{NODE} {NODE}"}, "", ["NEUROSHARD_PEER", "is not of the form"]),
        ({}, {}, "peer = 5", ["peer", "config.toml", "64 addresses"]),
        ({}, {}, f"peer = {[NODE.replace('4001', str(port)) for port in range(1, 66)]}", ["peer", "at most 64"]),
    ],
)
def test_wrong_values_name_setting_source_value_and_what_is_allowed(
    tmp_path: Path, flags: dict[str, object], environment: dict[str, str], config: str, words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, flags, environment, config)
    for word in words:
        assert word in str(caught.value)


def test_addresses_of_peers_from_every_source(tmp_path: Path) -> None:
    other = NODE.replace("4001", "4002")
    assert loaded(tmp_path).settings.peer == ()
    assert loaded(tmp_path, {"peer": [NODE, other, NODE]}).settings.peer == (NODE, other)
    assert loaded(tmp_path, {}, {"NEUROSHARD_PEER": f"{NODE}, {other},"}).settings.peer == (NODE, other)
    result = loaded(tmp_path, config=f'peer = ["{NODE}", "{other}"]')
    assert result.settings.peer == (NODE, other)
    assert result.describe()["peer"] == {**described(result, "peer"), "value": [NODE, other], "source": "config.toml"}


def test_settings_of_the_network_without_any_source(tmp_path: Path) -> None:
    settings = loaded(tmp_path).settings
    assert (settings.run, settings.p2p_port, settings.p2p_host, settings.max_upload) == (None, 0, "0.0.0.0", None)
    assert (settings.network, settings.lan_discovery, settings.port_mapping, settings.relay) == (True, True, True, True)


def test_a_run_id_may_be_written_in_capitals(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"run": "AB" * 32}).settings.run == "ab" * 32


def test_malformed_toml_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 2"):
        loaded(tmp_path, config="port = 1\nmemory = = 2\n")


def test_a_config_file_that_is_not_text_or_huge_or_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not text"):
        loaded(tmp_path)
    (tmp_path / "config.toml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(UsageError, match="larger"):
        loaded(tmp_path)
    (tmp_path / "config.toml").unlink()
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        loaded(tmp_path)


def test_the_token_never_appears_in_text_dumps_or_errors(tmp_path: Path) -> None:
    result = loaded(tmp_path, {"token": SECRET})
    shown = [repr(result), str(result.settings), repr(result.settings.model_dump()), result.settings.model_dump_json()]
    assert not any(SECRET in text for text in [*shown, repr(result.describe())])
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, config=f'token = ["{SECRET}"]')
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_settings_are_frozen_and_do_not_read_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEUROSHARD_PORT", "1")
    settings = Settings()
    assert settings.port == 8000
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 2  # type: ignore[misc]


def test_alias_diloco_steps_from_every_source(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"diloco_steps": 7}).settings.inner_steps == 7
    assert loaded(tmp_path, {}, {"NEUROSHARD_DILOCO_STEPS": "8"}).settings.inner_steps == 8
    assert loaded(tmp_path, config="diloco_steps = 9").settings.inner_steps == 9


def described(result: LoadedSettings, key: str) -> dict[str, object]:
    facts = result.describe()[key]
    assert isinstance(facts, dict)
    return dict(facts)


def token_of(result: LoadedSettings) -> str:
    return read_token(result).get_secret_value()


def test_token_file_is_stripped_and_open_permissions_are_told(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\xef\xbb\xbf  " + SECRET.encode() + b" \r\n")
    file.chmod(0o600)
    result = loaded(tmp_path, {"token_file": str(file)})
    assert token_of(result) == SECRET
    assert result.warnings == ()
    file.chmod(0o644)
    warned = loaded(tmp_path, {"token_file": file})
    assert "chmod 600" in warned.warnings[0]
    assert SECRET not in repr(warned)


def test_token_and_token_file_obey_precedence(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from file")
    file.chmod(0o600)
    environment = {"NEUROSHARD_TOKEN": "from environment"}
    by_file = loaded(tmp_path, {"token_file": file}, environment)
    assert (token_of(by_file), by_file.sources["token"]) == ("from file", "flag")
    flags: dict[str, object] = {"token": "from flag"}
    file_variable = {"NEUROSHARD_TOKEN_FILE": str(file)}
    assert token_of(loaded(tmp_path, flags, file_variable)) == "from flag"
    with pytest.raises(UsageError, match="only one"):
        loaded(tmp_path, {}, environment | file_variable)


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xff", b"a" * 70_000])
def test_missing_or_empty_token_files_are_token_errors(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TokenError):
        loaded(tmp_path, {"token_file": file})


def test_no_token_is_an_error_only_where_one_is_needed(tmp_path: Path) -> None:
    result = loaded(tmp_path)
    assert result.settings.token is None
    with pytest.raises(TokenError, match="neuroshard demo"):
        read_token(result)
    with pytest.raises(TokenError, match=r"NEUROSHARD_TOKEN.* is empty"):
        read_token(loaded(tmp_path, {}, {"NEUROSHARD_TOKEN": " "}))


def test_the_data_dir_alone(tmp_path: Path) -> None:
    variables = {"NEUROSHARD_DATA_DIR": str(tmp_path / "a")}
    assert resolve_data_dir(None, variables) == tmp_path / "a"
    assert resolve_data_dir(tmp_path / "b", variables) == tmp_path / "b"


def test_data_dir_follows_the_precedence_and_finds_its_config(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, port in ((first, 1111), (second, 2222)):
        folder.mkdir()
        (folder / "config.toml").write_text(f"port = {port}")
    by_variable = load_settings({}, {"NEUROSHARD_DATA_DIR": str(first)}, tmp_path)
    by_flag = load_settings({"data_dir": second}, {"NEUROSHARD_DATA_DIR": str(first)})
    assert (by_variable.settings.port, by_variable.settings.data_dir) == (1111, first)
    assert (by_flag.settings.port, by_flag.sources["data_dir"]) == (2222, "flag")


def test_default_data_dir_prefers_an_existing_classic_folder(tmp_path: Path) -> None:
    assert default_data_dir(tmp_path).name == "neuroshard"
    (tmp_path / ".neuroshard").mkdir()
    assert default_data_dir(tmp_path) == tmp_path / ".neuroshard"


def test_data_dir_is_private_and_an_unusable_one_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    prepare_data_dir(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError, match="--data-dir"):
        prepare_data_dir(blocked / "data")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes of files")
def test_a_data_dir_that_others_can_read_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    for mode in (0o755, 0o750, 0o701, 0o777, 0o700):
        folder.chmod(mode)
        prepare_data_dir(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o1777)  # as /tmp: closing it would harm every other program
    with pytest.raises(StorageError, match="share the folder"):
        prepare_data_dir(folder)
    assert folder.stat().st_mode & 0o7777 == 0o1777

    def no_modes(self: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    folder.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", no_modes)
    prepare_data_dir(folder)  # a disk for all systems, which has no modes: nobody else can write there


def test_every_setting_has_a_note_and_an_application_time() -> None:
    table = application_table()
    assert set(table) == set(Settings.model_fields)
    assert all(note_of(key).allowed for key in table)
    assert table["data_dir"] is Applies.NOT_STORED
    assert table["port"] is Applies.AFTER_RESTART
    assert set(ALIASES.values()) <= set(table)
