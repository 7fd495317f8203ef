"""`pagekeeper status` and `pagekeeper down`: look at a server from outside, and end it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pagekeeper import lock, probe
from pagekeeper.config import AtConfig, first_key

STOP_SECONDS = 90.0  # for a server that drains, before `down` stops waiting


def status(config: AtConfig) -> int:
    """Print what runs in the run directory; returns 0 when it serves, 3 when it does not."""
    api, admin = probe.address(config.run_dir, "gateway"), probe.address(config.run_dir, "memd")
    if not lock.owner(config.run_dir) and not api and not admin:
        print(f"nothing runs in {config.run_dir}")
        return 3
    key = first_key(config.api_keys)
    ready = bool(api) and probe.get(f"{api}/ready")[0] == 200
    models = probe.get_json(f"{api}/v1/models", key).get("data", []) if api else []
    state = probe.get_json(f"{admin}/v1/state", config.admin_token or "") if admin else {}
    print("\n".join(_table(api, admin, ready, models, state)))
    return 0 if ready else 3


def _table(
    api: str, admin: str, ready: bool, models: list[dict[str, Any]], state: dict[str, Any]
) -> list[str]:
    rows = [
        ("gateway", f"{api or 'not running'}  {'ready' if ready else 'not ready'}"),
        ("model", ", ".join(str(model.get("id")) for model in models) or "-"),
        ("memd", f"{admin or 'not running'}  epoch {state.get('epoch', '-')}"),
    ]
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
