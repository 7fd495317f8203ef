"""The gateway's settings: flags `--port …`, environment `GATEWAY_PORT …`, and their limits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from wire.logs import LogFormat, LogLevel
from wire.settings import Secret, Size, default_run_dir, flag, load

_SOCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")


def _executor_names(names: tuple[str, ...]) -> None:
    if not names:
        raise ValueError("must name at least one executor, such as executor-0")
    for name in names:
        if not _SOCKET_NAME.fullmatch(name):
            raise ValueError("must be names of letters, digits, '.', '_' and '-'")
    if len(set(names)) != len(names):
        raise ValueError("must not name an executor twice")


def _origins(origins: tuple[str, ...]) -> None:
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError("must be '*' or origins such as http://localhost:3000, without a path")


def _not_empty(text: str) -> None:
    if not text.strip():
        raise ValueError("must not be empty")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of one gateway process. Durations are seconds, sizes bytes."""

    host: str = flag("127.0.0.1", "address to listen on", check=_not_empty)
    port: int = flag(8000, "TCP port; 0 takes a free one", least=0, most=65535)
    run_dir: Path = flag(default_run_dir(), "directory of the processes' sockets")
    executors: tuple[str, ...] = flag(
        ("executor-0",), "executors: names of sockets in the run dir", check=_executor_names
    )

    api_keys: Secret | None = flag(
        None, "keys a client may send as 'Authorization: Bearer KEY', separated by commas"
    )
    api_key_file: Path | None = flag(
        None, "file of keys, one 'KEY [TENANT]' a line; KEY may be sha256:HEX"
    )
    insecure_no_auth: bool = flag(False, "allow a public --host without API keys")
    public_metrics: bool = flag(False, "serve /metrics without a key")
    cors_origins: tuple[str, ...] = flag(
        (), "origins whose web pages may call this server; * for any", check=_origins
    )

    max_body: Size = flag(Size(8 << 20), "largest request body", least=1024, most=1 << 30)
    max_requests: int = flag(1024, "requests in progress, in all", least=1)
    max_queued_tokens: int = flag(1 << 20, "prompt tokens waiting for their first token", least=1)
    per_key_requests: int = flag(256, "requests in progress per API key; 0: no limit", least=0)
    max_connections: int = flag(4096, "open connections", least=1)

    header_timeout: float = flag(10.0, "seconds for a request's headers to arrive", least=0.01)
    body_timeout: float = flag(15.0, "seconds for a request's body to arrive", least=0.01)
    write_timeout: float = flag(
        10.0, "seconds a client may leave a response unread before it is dropped", least=0.01
    )
    keepalive_timeout: float = flag(75.0, "seconds an idle connection is kept", least=0.01)
    stuck_seconds: float = flag(
        60.0,
        "seconds without a finished step, while work is pending, that make /health fail",
        least=1,
    )
    drain_seconds: float = flag(30.0, "seconds running streams get to finish at shutdown", least=0)

    log_level: LogLevel = flag("info", "least severe messages to log")
    log_format: LogFormat = flag("text", "text for people, json for machines")


CONFIG = web.AppKey("config", GatewayConfig)


def load_config(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> GatewayConfig:
    """Settings from flags, environment and defaults; exits with status 2 on a bad value."""
    return load(
        GatewayConfig,
        program="gateway",
        prefix="GATEWAY",
        description="HTTP front of pagekeeper: OpenAI's API over one or more executors.",
        argv=argv,
        environ=environ,
    )
