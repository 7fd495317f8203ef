"""Files that results are written to, looked at before anything is measured."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def file(text: str) -> Path:
    """The path of a file that can be written; for argparse.

    Raises:
        argparse.ArgumentTypeError: its folder is not there, or it is one itself, or it may not be written.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: there is no folder {path.parent}"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} may not be written by this user")
    return path
