"""Asks the children over HTTP how they are, and finds their addresses in the run directory."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

TIMEOUT = 2.0  # seconds, for a server on the same machine


def get(url: str, token: str = "") -> tuple[int, bytes]:
    """GET `url`; returns status and body, (0, b"") when nobody answers.

    Args:
        token: sent as a bearer token unless empty.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "127.0.0.1", parts.port or 80, timeout=TIMEOUT
    )
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", parts.path or "/", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def ask(url: str, token: str = "") -> tuple[int, dict[str, Any]]:
    """GET `url`; returns status and the JSON object in the body, empty when there is none."""
    status, body = get(url, token)
    return status, _object(body)


def get_json(url: str, token: str = "") -> dict[str, Any]:
    """The JSON object at `url`; empty when it cannot be had."""
    status, found = ask(url, token)
    return found if status == 200 else {}


def address(run_dir: Path, process: str) -> str:
    """The URL that `memd` or `gateway` wrote to the run directory; empty when it has not yet.

    A wildcard address becomes the loopback one, which a client on this machine can use.
    """
    try:
        found = _object((run_dir / f"{process}.json").read_bytes())
    except OSError:
        return ""
    url = str(found.get("url") or found.get("admin") or "").rstrip("/")
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def needs_key(run_dir: Path) -> bool:
    """Whether the gateway wrote to the run directory that its clients must present a key."""
    try:
        return bool(_object((run_dir / "gateway.json").read_bytes()).get("needs_key"))
    except OSError:
        return False


def listen_error(host: str, port: int) -> OSError | None:
    """Why no server could listen there now; None when one could, which is always so for port 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do it: connections of the last run that still wind down do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
