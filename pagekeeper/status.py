"""`pagekeeper status` and `pagekeeper down`: look at a server from outside, and end it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pagekeeper import keys, lock, probe
from pagekeeper.config import AtConfig

STOP_SECONDS = 90.0  # for a server that drains, before `down` stops waiting


def status(config: AtConfig) -> int:
    """Print what runs in the run directory; returns 0 when it serves, 3 when it does not."""
    api, admin = probe.address(config.run_dir, "gateway"), probe.address(config.run_dir, "memd")
    if not lock.owner(config.run_dir) and not api and not admin:
        print(f"nothing runs in {config.run_dir}")
        return 3
    ready, said = _readiness(api) if api else (False, "")
    token = config.admin_token or os.environ.get("MEMD_ADMIN_TOKEN", "")
    status, state = probe.ask(f"{admin}/v1/state", token) if admin else (0, {})
    epoch = state.get("epoch", "-") if status != 401 else "needs a token (PAGEKEEPER_ADMIN_TOKEN)"
    model = _model(config, api) if api else "-"
    rows = [
        ("gateway", f"{api}  {said}" if api else "not running"),
        ("model", model),
        ("memd", f"{admin}  epoch {epoch}" if admin else "not running"),
    ]
    print("\n".join(_table(rows, state)))
    return 0 if ready else 3


def _readiness(api: str) -> tuple[bool, str]:
    """Whether it serves, and what to say of it: `ready`, or why not, such as that it drains."""
    code, body = probe.ask(f"{api}/ready")
    if code == 200:
        return True, "ready"
    return False, f"not ready: {body.get('status') or 'it does not answer'}"


def _model(config: AtConfig, api: str) -> str:
    """What is served, or what keeps us from asking. A gateway that needs a key is not asked without one:
    it would log a refusal."""
    key = keys.find(config.api_keys).one
    if not key and probe.needs_key(config.run_dir):
        return "needs a key (PAGEKEEPER_API_KEYS)"
    code, body = probe.ask(f"{api}/v1/models", key)
    if code == 401:
        return "the key is not one of this server's (PAGEKEEPER_API_KEYS)"
    return ", ".join(str(model.get("id")) for model in body.get("data", [])) or "-"


def _table(rows: list[tuple[str, str]], state: dict[str, Any]) -> list[str]:
    for pool in state.get("pools", []):
        total = pool.get("total", 0)
        shares = "  ".join(f"{kind} {pool.get(kind, '-')}" for kind in ("used", "cached", "free"))
        rows.append((f"pool {pool.get('name', '')}", f"{total} blocks: {shares}"))
        rows.append(("sequences", str(pool.get("sequences", "-"))))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def down(config: AtConfig) -> int:
    """Ask the launcher of the run directory to stop and wait for it; returns 0 when it has ended."""
    pid = lock.owner(config.run_dir)
    if not pid:
        print(f"nothing runs in {config.run_dir}")
        return 0
    os.kill(pid, signal.SIGTERM)
    if _released(config.run_dir, STOP_SECONDS):
        print("stopped")
        return 0
    print(
        f"pagekeeper: process {pid} still drains after {STOP_SECONDS:g} s; `pagekeeper down` again "
        "stops it at once",
        file=sys.stderr,
    )
    return 1


def _released(run_dir: Path, within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not lock.owner(run_dir):
            return True
        time.sleep(0.1)
    return False
