"""Who may ask the admin server: a Host allow-list against DNS rebinding, and a token where one is set.

One middleware stands before everything, routed or not, so a path that somebody forgot is closed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

from memd.config import is_loopback

OPEN_PATHS = frozenset({"/health", "/ready"})  # asked by supervisors, which hold no token
CHALLENGE = 'Bearer realm="memd", Basic realm="memd"'


def host_name(header: str) -> str:
    """The name in a Host header, in lower case, without port and brackets; empty when it is malformed."""
    text = header.strip().lower()
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not (rest[0] == ":" and rest[1:].isdecimal())):
            return ""
        return name
    name, colon, port = text.partition(":")
    if colon and not port.isdecimal():
        return ""
    return name.removesuffix(".")


class HostList:
    """The names this server answers to."""

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        self._names = {"localhost", host_name(bound) if ":" not in bound else bound.lower()}
        self._names |= {name.lower().removesuffix(".") for name in allowed}

    def allows(self, headers: list[str]) -> bool:
        """Whether the request's Host headers are one known name."""
        if len(headers) != 1:
            return False
        name = host_name(headers[0])
        return bool(name) and (name in self._names or is_loopback(name))


class Token:
    """A secret, compared through digests so that time tells nothing of it, not even its length."""

    def __init__(self, secret: str) -> None:
        self._digest = hashlib.sha256(secret.encode()).digest()

    def accepts(self, authorization: str) -> bool:
        """`Bearer TOKEN`, or `Basic` with the token as password, which is what a browser can send."""
        scheme, _, given = authorization.strip().partition(" ")
        presented = given.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "basic":
            try:
                _, _, presented = base64.b64decode(presented, validate=True).partition(b":")
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(hashlib.sha256(presented).digest(), self._digest)


def same_origin(origin: str | None, host: str) -> bool:
    """Whether a request that names an origin comes from this server's own page."""
    if origin is None:
        return True
    _, separator, rest = origin.partition("://")
    return bool(separator) and rest.lower() == host.strip().lower()
