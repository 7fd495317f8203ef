"""memd's settings: flags, `MEMD_*` environment twins, and the rules between them."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wire.logs import LogFormat, LogLevel
from wire.settings import Secret, default_run_dir, flag, load


class BadConfig(ValueError):
    """Settings that are each fine and together are not; the message says what to do."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address bound to `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_reserve(text: str) -> tuple[str, float]:
    """`tenant=share` as a pair; the tenant may hold any character but the last `=` ends it.

    Raises:
        ValueError: no share, or one below 0, or 1 and above.
    """
    tenant, separator, share = text.rpartition("=")
    try:
        value = float(share)
    except ValueError:
        value = -1.0
    if not separator or not 0 <= value < 1:
        raise ValueError("must be TENANT=SHARE with a share from 0 to below 1, such as acme=0.2")
    if len(tenant) > 64:
        raise ValueError("has a tenant of more than 64 characters")
    return tenant, value


def _check_reserves(entries: tuple[str, ...]) -> None:
    pairs = [parse_reserve(entry) for entry in entries]
    if len({tenant for tenant, _ in pairs}) < len(pairs):
        raise ValueError("names a tenant twice")
    if sum(share for _, share in pairs) >= 1:
        raise ValueError("reserves the whole pool: the shares together must stay below 1")


@dataclass(frozen=True, slots=True)
class Config:
    """What `python -m memd` takes."""

    run_dir: Path = flag(default_run_dir(), "directory of the sockets, entered by this user only")
    state_dir: Path | None = flag(
        None, "directory of the epoch file, kept over restarts; the run directory if not given"
    )
    admin_host: str = flag("127.0.0.1", "address of the admin HTTP server")
    admin_port: int = flag(
        9100, "its port; 0 takes a free one, told in RUN_DIR/memd.json", least=0, most=65535
    )
    admin_token: Secret | None = flag(
        None, "what admin requests must present; needed for an address others can reach"
    )
    insecure_no_auth: bool = flag(
        False, "serve an address others can reach without a token (something else guards it)"
    )
    allowed_hosts: tuple[str, ...] = flag(
        (), "names admin requests may use for this host, beside localhost and --admin-host"
    )
    lease_ms: int = flag(
        3000, "an executor silent for this long has lost its blocks", least=200, most=600_000
    )
    reserve: tuple[str, ...] = flag(
        (), "TENANT=SHARE of cached blocks that others cannot evict", check=_check_reserves
    )
    nice: int = flag(0, "scheduling priority, -20 (first) to 19 (last)", least=-20, most=19)
    log_level: LogLevel = flag("info", "least severe log line that is written")
    log_format: LogFormat = flag("text", "lines for people, or JSON objects for machines")

    @property
    def reserves(self) -> dict[str, float]:
        return dict(parse_reserve(entry) for entry in self.reserve)


def check(config: Config) -> None:
    """Rules between settings.

    Raises:
        BadConfig: the admin server would be open to other machines.
    """
    guarded = config.admin_token is not None or is_loopback(config.admin_host)
    if not guarded and not config.insecure_no_auth:
        raise BadConfig(
            f"--admin-host {config.admin_host} can be reached from other machines, and nothing "
            "guards it: set MEMD_ADMIN_TOKEN, bind a loopback address such as 127.0.0.1, or say "
            "--insecure-no-auth where something else guards it"
        )


def read(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Settings from flags and environment; exits with status 2 on a bad value."""
    return load(
        Config,
        program="memd",
        prefix="MEMD",
        description="The memory daemon: owns the KV blocks of this host's executors.",
        argv=argv,
        environ=environ,
    )
