from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gateway.config import GatewayConfig, load_config


def test_every_flag_has_an_environment_twin_and_the_flag_wins() -> None:
    environ = {"GATEWAY_PORT": "9000", "GATEWAY_BODY_TIMEOUT": "2.5", "GATEWAY_EXECUTORS": "a,b"}
    config = load_config(["--port", "9001"], environ)
    assert (config.port, config.body_timeout, config.executors) == (9001, 2.5, ("a", "b"))


def test_out_of_the_box_only_this_machine_is_served_and_no_page_may_call() -> None:
    config = load_config([], {})
    assert config.host == "127.0.0.1"
    assert config.port == 8000
    assert config.cors_origins == ()
    assert config.max_body == 8 << 20
    assert not config.insecure_no_auth
    assert not config.public_metrics


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "65536"),
        ("--port", "-1"),
        ("--port", "http"),
        ("--host", " "),
        ("--executors", ","),
        ("--executors", "../etc"),
        ("--executors", "a,a"),
        ("--max-body", "0"),
        ("--max-requests", "0"),
        ("--max-connections", "0"),
        ("--header-timeout", "0"),
        ("--body-timeout", "nan"),
        ("--drain-seconds", "-1"),
        ("--cors-origins", "example.com"),
        ("--cors-origins", "http://a/path"),
        ("--api-keys", ""),
        ("--api-keys", "  "),
        ("--log-level", "loud"),
    ],
)
def test_a_bad_value_ends_the_start_with_a_line_that_names_the_flag(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config([f"{flag}={value}"], {})
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert flag in said
    assert len(said.splitlines()) == 1


def test_an_empty_variable_of_keys_does_not_switch_authentication_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        load_config([], {"GATEWAY_API_KEYS": ""})
    assert "GATEWAY_API_KEYS" in capsys.readouterr().err


def test_printing_the_settings_shows_all_of_them_and_no_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--api-keys", "very-secret", "--run-dir", str(tmp_path), "--print-config"], {})
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "very-secret" not in out
    shown = json.loads(out)
    assert set(shown) == {field.name for field in dataclasses.fields(GatewayConfig)}
    assert shown["run_dir"] == str(tmp_path)
