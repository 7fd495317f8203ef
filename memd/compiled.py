"""memd's core as machine code: the same Python files, compiled by mypyc, in a folder of the user's cache.

    python -m memd.compiled           compiles into the cache, some ten seconds, and prints where to
    python -m memd.compiled FOLDER    the same into FOLDER, for images, which have no compiler when they run:
                                      PAGEKEEPER_CORES names that folder to them

memd takes the compiled modules when the folder was made from exactly these sources by this Python, and the
plain ones otherwise; `MEMD_PLAIN=1` forbids it. Behaviour is the same, the time in the core about half: tests
run both against the same oracle.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import memd
from wire.settings import cache_dir

MODULES = ("prefix", "pool", "tables", "steps", "leases", "journal", "core")
TIMEOUT_S = 300
ROOT = Path(__file__).resolve().parent.parent


class CannotCompile(RuntimeError):
    """One line that says why."""


def folder(under: Path | None = None) -> Path:
    """Where the compiled form of these very sources is, or would be: by default in the cache."""
    hasher = hashlib.sha256((sys.version + str(sysconfig.get_config_var("EXT_SUFFIX"))).encode())
    for path in sorted([*ROOT.glob("memd/*.py"), *ROOT.glob("wire/*.py")]):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes())
    return (under or cache_dir() / "memd") / hasher.hexdigest()[:20]


def found() -> Path | None:
    """The compiled form, of the image or of the cache, if there is one."""
    shipped = os.environ.get("PAGEKEEPER_CORES")
    try:
        for under in (Path(shipped) if shipped else None, None):
            if (candidate := folder(under)).joinpath("memd").is_dir():
                return candidate
    except (OSError, RuntimeError):  # no home, no permission: then there is no cache
        pass
    return None


def prefer() -> bool:
    """Import the core's modules in compiled form, if there is one; to be called before any is imported."""
    if os.environ.get("MEMD_PLAIN"):
        return False
    if (made := found()) is None:
        return False
    sys.path.append(str(made))  # for what the modules share
    memd.__path__.insert(0, str(made / "memd"))
    try:
        for module in MODULES:
            importlib.import_module(f"memd.{module}")
    except ImportError:
        sys.path.remove(str(made))
        memd.__path__.remove(str(made / "memd"))
        for module in MODULES:
            sys.modules.pop(f"memd.{module}", None)
        return False
    return True


def build(under: Path | None = None) -> Path:
    """Compile, unless it was done before; returns the folder, by default one in the cache.

    Raises:
        CannotCompile: no mypyc, no C compiler, or the cache cannot be written.
    """
    target = folder(under)
    if (target / "memd").is_dir():
        return target
    try:
        # A cache is its user's alone; what an image ships is read by whoever runs it.
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o755 if under else 0o700)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
            _compile(Path(scratch))
            made = Path(scratch) / "made"
            (made / "memd").mkdir(parents=True)
            for library in Path(scratch).glob("*.so"):
                shutil.move(library, made)
            for library in Path(scratch).glob("memd/*.so"):
                shutil.move(library, made / "memd")
            if not target.exists():  # else another process was faster
                made.rename(target)
    except OSError as error:
        raise CannotCompile(f"{target.parent} cannot be written: {error.strerror}") from error
    return target


def _compile(scratch: Path) -> None:
    for package in ("memd", "wire"):
        shutil.copytree(
            ROOT / package, scratch / package, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    files = [f"memd/{module}.py" for module in MODULES]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mypyc", *files],
            cwd=scratch,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    [str(scratch), os.environ.get("PYTHONPATH", "")]
                ).rstrip(os.pathsep),
                "MYPY_CACHE_DIR": str(scratch / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotCompile(f"mypyc took longer than {TIMEOUT_S} s") from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        wrong = [line for line in lines if "error" in line.lower()] or lines[-1:]
        raise CannotCompile(f"mypyc failed: {wrong[0][:300]}")


def main() -> int:
    """Exit status 1 when it could not be compiled; memd then runs as plain Python."""
    try:
        print(f"memd's core is compiled: {build(Path(sys.argv[1]) if sys.argv[1:] else None)}")
    except CannotCompile as error:
        print(f"memd's core stays plain Python: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
