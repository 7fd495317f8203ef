"""Builds the native step with the system's compiler, once per source, flags and compiler.

    python -m kernels.cpu.build           what this CPU needs, into the cache; prints where it is
    python -m kernels.cpu.build FOLDER    every variant for this kind of CPU, into FOLDER

The second is for images, which have no compiler when they run and may run on any CPU: PAGEKEEPER_KERNELS
names that folder to them.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernels.cpu.features import VARIANTS, Variant, usable

SOURCE = Path(__file__).with_name("step.cpp")
INCLUDED = tuple(
    SOURCE.with_name(f"{name}.h") for name in ("draw", "quantised", "threads", "vectors")
)
COMPILERS = ("g++", "clang++", "c++")
# GNU dialect: products and sums may fuse, as everywhere else in numerics; nothing of -ffast-math.
FLAGS = (
    "-std=gnu++20",
    "-O2",
    "-ftree-vectorize",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fno-strict-aliasing",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-w",
)
TIMEOUT_S = 300.0


class Unavailable(RuntimeError):
    """There is no native step here; the message is one line that says why."""


def cache_folder() -> Path:
    """Where builds are kept: PAGEKEEPER_CACHE, or pagekeeper in the user's cache folder.

    Raises:
        Unavailable: this user has none.
    """
    if given := os.environ.get("PAGEKEEPER_CACHE"):
        return Path(given) / "kernels"
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "pagekeeper" / "kernels"
    try:
        return Path.home() / ".cache" / "pagekeeper" / "kernels"
    except RuntimeError as error:
        raise Unavailable(
            "this user has no home to keep the native step in: set HOME or PAGEKEEPER_CACHE"
        ) from error


def compiler() -> list[str]:
    """The command that compiles C++: CXX of the environment, or the first of `COMPILERS` there is.

    Raises:
        Unavailable: there is none.
    """
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise Unavailable(f"CXX={os.environ['CXX']} cannot be read: {error}") from error
    if given:
        if shutil.which(given[0]) is None:
            raise Unavailable(f"CXX names {given[0]}, which is not an installed program")
        return given
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise Unavailable(
        f"no C++ compiler was found ({', '.join(COMPILERS)}); install g++ to have the native step"
    )


def best_variant() -> Variant:
    """The fastest variant for this CPU.

    Raises:
        Unavailable: the kind of CPU is not known.
    """
    variants = usable()
    if not variants:
        raise Unavailable(f"the native step does not know this kind of CPU ({os.uname().machine})")
    return variants[0]


def library(variant: Variant) -> Path:
    """The shared library of `variant`: shipped, or from the cache, or built now.

    Several processes may build at once: each writes a file of its own and renames it.

    Raises:
        Unavailable: there is no compiler, it failed, or the cache cannot be written.
    """
    if folder_given := os.environ.get("PAGEKEEPER_KERNELS"):
        shipped = _shipped(folder_given, variant)
        if os.access(shipped, os.R_OK):
            return shipped
    command = [*compiler(), *FLAGS, *variant.flags]
    folder = cache_folder()
    target = folder / f"step-{variant.name}-{_digest(command)}.so"
    if not os.access(target, os.R_OK):
        _build(command, target)
    return target


def forget(target: Path) -> bool:
    """Remove a library that cannot be loaded from the cache, to be built again; False for a shipped one.

    Raises:
        Unavailable: it cannot be removed.
    """
    if target.parent == Path(os.environ.get("PAGEKEEPER_KERNELS") or os.devnull):
        return False
    try:
        target.unlink(missing_ok=True)
    except OSError as error:
        raise Unavailable(f"{target} is damaged and cannot be removed: {error.strerror}") from error
    return True


def ship(folder: Path) -> list[Path]:
    """Build every variant for this kind of CPU into `folder`, for machines without a compiler.

    Raises:
        Unavailable: as `library`.
    """
    built = []
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)  # whoever runs the image reads it
    for variant in VARIANTS:
        if os.uname().machine in variant.machine:
            target = _shipped(str(folder), variant)
            _build([*compiler(), *FLAGS, *variant.flags], target)
            built.append(target)
    return built


def _shipped(folder: str, variant: Variant) -> Path:
    """Named by source and flags only: whoever runs it has no compiler to ask."""
    hasher = _sources()
    hasher.update("\0".join([*FLAGS, *variant.flags]).encode())
    return Path(folder) / f"step-{variant.name}-{hasher.hexdigest()[:20]}.so"


def _build(command: list[str], target: Path) -> None:
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    except OSError as error:
        raise Unavailable(
            f"the native step cannot be kept in {folder}: {error.strerror}"
        ) from error
    os.close(handle)
    built = Path(name)
    try:
        _compile([*command, "-o", name, str(SOURCE)])
        if built.stat().st_size == 0:
            raise Unavailable(f"{command[0]} reported success on the native step and wrote nothing")
        built.chmod(0o755)
        built.replace(target)
    finally:
        built.unlink(missing_ok=True)


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took longer than {TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise Unavailable(f"{command[0]} could not be run: {error.strerror}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [
            f"exit status {done.returncode}"
        ]
        raise Unavailable(f"{command[0]} failed on the native step: {errors[0].strip()}")


def _sources() -> hashlib._Hash:
    hasher = hashlib.sha256()
    for path in (SOURCE, *INCLUDED):
        hasher.update(path.read_bytes())
    return hasher


def _digest(command: list[str]) -> str:
    """Of all that decides what is built."""
    hasher = _sources()
    hasher.update("\0".join([*command, _version(command[0])]).encode())
    return hasher.hexdigest()[:20]


def _version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "-dumpfullversion", "-dumpversion", "-dumpmachine"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{program} could not be run: {error}") from error
    return done.stdout


def main() -> int:
    """Exit status 1 when nothing could be built."""
    try:
        for path in ship(Path(sys.argv[1])) if sys.argv[1:] else [library(best_variant())]:
            print(path)
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
