"""One logging set-up for all processes: text for people, or a JSON object per line for machines.

Messages carry key fields (`request=`, `seq=`, `instance=`); prompt text is never logged above DEBUG.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


_ID = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24}\b")


class _TextFormatter(logging.Formatter):
    """Cuts random ids to eight digits on info lines, which people skim; warnings and JSON have them whole."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return _ID.sub(r"\1", line) if record.levelno == logging.INFO else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def configure(process: str, level: LogLevel, style: LogFormat) -> None:
    """Send this process's log lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(
            _TextFormatter(f"%(asctime)s %(levelname).1s {process} %(message)s", "%H:%M:%S")
        )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
