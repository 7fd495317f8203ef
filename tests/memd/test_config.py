from __future__ import annotations

import pytest

from memd.config import BadConfig, check, is_loopback, read


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_an_address_only_this_machine_reaches_needs_no_token(host: str) -> None:
    check(read(["--admin-host", host], {}))


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.evil.org", ""]
)
def test_any_other_address_without_a_token_is_refused_with_what_to_do(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(BadConfig, match="MEMD_ADMIN_TOKEN"):
        check(read(["--admin-host", host], {}))
    check(read(["--admin-host", host], {"MEMD_ADMIN_TOKEN": "s3cret"}))


def test_reserves_are_shares_by_tenant() -> None:
    config = read(["--reserve", "acme=0.2, a=b=0.5,=0.1"], {})
    assert config.reserves == {"acme": 0.2, "a=b": 0.5, "": 0.1}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("acme", "must be TENANT=SHARE"),
        ("acme=", "must be TENANT=SHARE"),
        ("acme=1", "must be TENANT=SHARE"),
        ("acme=-0.1", "must be TENANT=SHARE"),
        ("acme=nan", "must be TENANT=SHARE"),
        ("acme=0.5,acme=0.1", "names a tenant twice"),
        ("a=0.5,b=0.5", "must stay below 1"),
        ("t" * 65 + "=0.1", "more than 64 characters"),
    ],
)
def test_a_reserve_that_cannot_be_kept_is_refused(
    text: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(["--reserve", text], {})
    assert rule in capsys.readouterr().err
