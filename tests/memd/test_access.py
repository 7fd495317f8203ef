from __future__ import annotations

import base64

import pytest

from memd.access import HostList, Token, host_name, same_origin


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:9100", "localhost"),
        ("localhost.", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]:9100", "::1"),
        ("[::1]", "::1"),
        ("memd.internal:1", "memd.internal"),
        ("[::1", ""),
        ("[::1]x", ""),
        ("localhost:x", ""),
        ("localhost:", ""),
        ("::1", ""),
        ("user@localhost", "user@localhost"),
        ("", ""),
    ],
)
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize("header", ["localhost", "127.0.0.1:9100", "[::1]:5", "memd", "Memd:9100"])
def test_loopback_names_and_allowed_names_are_answered(header: str) -> None:
    assert HostList("127.0.0.1", ["memd"]).allows([header])


@pytest.mark.parametrize(
    "headers",
    [
        [], [""], ["evil.example"], ["localhost.evil.example"], ["localhost/evil.example"],
        ["localhost?x"], ["evil.example#localhost"], ["localhost@evil.example"], ["10.0.0.1"],
        ["0.0.0.0"], ["localhost", "localhost"], ["localhost, evil.example"], ["127.0.0.1.evil.example"],
    ],
)  # fmt: skip
def test_any_other_name_is_not(headers: list[str]) -> None:
    assert not HostList("127.0.0.1", ["memd"]).allows(headers)


def test_the_bound_address_is_a_name_of_its_own() -> None:
    assert HostList("10.0.0.1", []).allows(["10.0.0.1:9100"])
    assert HostList("fd00::1", []).allows(["[fd00::1]:9100"])


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    "header", ["Bearer s3cret", "bearer  s3cret ", basic("", "s3cret"), basic("any", "s3cret")]
)
def test_a_right_token_is_accepted_in_both_schemes(header: str) -> None:
    assert Token("s3cret").accepts(header)


@pytest.mark.parametrize(
    "header",
    [
        "", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3crett", "Bearer S3CRET", "s3cret",
        "Digest s3cret", "Basic s3cret", "Basic !!!", basic("s3cret", ""), basic("a", "b:s3cret"),
        "Bearer \udcff",
    ],
)  # fmt: skip
def test_anything_else_is_not(header: str) -> None:
    assert not Token("s3cret").accepts(header)


def test_a_token_with_a_colon_works_in_both_schemes() -> None:
    assert Token("a:b").accepts("Bearer a:b")
    assert Token("a:b").accepts(basic("user", "a:b"))


def test_only_this_servers_own_page_may_send_an_origin() -> None:
    assert same_origin(None, "localhost:9100")
    assert same_origin("http://localhost:9100", "localhost:9100")
    for origin in ("null", "", "http://evil.example", "http://localhost:8000", "localhost:9100"):
        assert not same_origin(origin, "localhost:9100")
