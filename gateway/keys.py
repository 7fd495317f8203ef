"""The parts of the gateway that handlers find in the application, by typed key."""

from __future__ import annotations

from gateway.config import CONFIG
from gateway.engine import ENGINE
from gateway.limits import ADMISSION
from gateway.metrics import METRICS

__all__ = ["ADMISSION", "CONFIG", "ENGINE", "METRICS"]
