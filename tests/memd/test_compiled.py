"""memd's core compiled: the same answers as the plain one, judged by the same oracle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memd import compiled

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
import sys
from memd import compiled
print(compiled.prefer())
import memd.tables
from memd.core import Memory
from tests.memd.fuzz import fuzz
made = []
def remember(**settings):
    made.append(Memory(**settings))
    return made[-1]
fuzz(7, 4000, remember)
fuzz(8, 2000, remember, hash_bits=4)
print(*[one.digest().hex() for one in made])
print(memd.tables.__file__.endswith(".py"))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the core compiled in it."""
    if not (shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")):
        pytest.skip("no C compiler")
    pytest.importorskip("mypyc")
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEKEEPER_CACHE", str(folder))
        compiled.build(folder / "memd")
    return folder


def play(cache: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PLAY],
        cwd=ROOT,
        env={**os.environ, "PAGEKEEPER_CACHE": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_the_compiled_core_passes_the_oracle_and_ends_in_the_same_state(cache: Path) -> None:
    used, digests, plain_file = play(cache)
    assert (used, plain_file) == ("True", "False")
    plain = play(cache, MEMD_PLAIN="1")
    assert (plain[0], plain[2]) == ("False", "True")
    assert digests == plain[1]
    assert len(digests.split()) >= 2


def test_a_core_compiled_from_other_sources_is_not_taken(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(cache))
    assert (compiled.folder() / "memd").is_dir()
    monkeypatch.setattr(sys, "version", "another Python")
    assert not compiled.folder().exists()
    assert not compiled.prefer()


def test_an_image_names_a_folder_of_its_own_and_the_cache_is_still_looked_at(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_cache = cache / "memd"
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(tmp_path))
    assert compiled.found() is None
    monkeypatch.setenv("PAGEKEEPER_CORES", str(in_cache))
    assert compiled.found() == compiled.folder(in_cache)
    for made in (in_cache, compiled.folder(in_cache)):
        assert made.stat().st_mode & 0o055 == 0o055  # an image's user is not who built it
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(cache))
    monkeypatch.setenv("PAGEKEEPER_CORES", str(tmp_path))
    assert compiled.found() == compiled.folder()


def test_no_compiler_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "/nonexistent/compiler")
    with pytest.raises(compiled.CannotCompile, match="mypyc failed"):
        compiled.build()
    assert list((tmp_path / "memd").iterdir()) == []
