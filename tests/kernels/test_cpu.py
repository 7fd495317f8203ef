"""Choosing, building and caching the native step; what it computes is tested with its runner."""

from __future__ import annotations

import os
import platform
import shutil
import stat
from pathlib import Path

import pytest

from kernels.cpu import build, native
from kernels.cpu.build import Unavailable, library
from kernels.cpu.features import VARIANTS, cpu_features, usable

AVX2 = {"avx2", "fma", "f16c", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("features", "machine", "best"),
    [
        (AVX512 | {"avx512_bf16", "avx512_vnni", "sse2"}, "x86_64", "avx512-bf16"),
        (AVX512, "x86_64", "avx512"),
        (AVX512 - {"avx512vl"}, "x86_64", "avx2"),
        (AVX2, "AMD64", "avx2"),
        (AVX2 - {"fma"}, "x86_64", "sse2"),
        (set(), "x86_64", "sse2"),
        ({"asimd"}, "aarch64", "neon"),
        (AVX512, "arm64", "neon"),
    ],
)
def test_a_cpu_gets_the_fastest_build_it_can_run(
    features: set[str], machine: str, best: str
) -> None:
    assert usable(features, machine)[0].name == best


def test_an_unknown_kind_of_cpu_gets_none() -> None:
    assert usable({"v"}, "riscv64") == ()


def test_features_are_read_from_the_first_cpu_of_x86_and_of_arm(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_features(file) == {"fpu", "avx2", "fma"}
    file.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert cpu_features(file) == {"fp", "asimd", "bf16"}
    assert cpu_features(tmp_path / "none") == frozenset()


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes each build and writes its arguments as the library."""
    program = tmp_path / "c++"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-dumpversion*) echo 1; exit 0;; esac\n'
        f"echo built >> {tmp_path}/builds\n"
        'while [ "$1" != -o ]; do shift; done\n'
        'echo library > "$2"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(tmp_path / "cache"))
    return program


def builds(program: Path) -> int:
    file = program.parent / "builds"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_library_is_built_once_and_again_for_other_flags_or_another_compiler(
    fake_compiler: Path,
) -> None:
    first = library(VARIANTS[0])
    assert first.read_text() == "library\n"
    assert library(VARIANTS[0]) == first
    assert builds(fake_compiler) == 1
    assert library(VARIANTS[1]) != first
    assert builds(fake_compiler) == 2
    fake_compiler.write_text(fake_compiler.read_text().replace("echo 1;", "echo 2;"))
    assert library(VARIANTS[0]) != first
    assert builds(fake_compiler) == 3


def test_nothing_but_libraries_stays_in_the_cache_and_others_cannot_read_it(
    fake_compiler: Path,
) -> None:
    path = library(VARIANTS[0])
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(fake_compiler: Path) -> None:
    fake_compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-dumpversion*) exit 0;; esac\n'
        "echo 'step.cpp:7: error: no such thing' >&2\nexit 1\n"
    )
    with pytest.raises(Unavailable, match=r"failed on the native step: .*no such thing"):
        library(VARIANTS[0])
    assert list(build.cache_folder().iterdir()) == []


def test_no_compiler_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler was found") as caught:
        library(VARIANTS[0])
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("CXX", "nonesuch -O1")
    with pytest.raises(Unavailable, match="CXX names nonesuch"):
        library(VARIANTS[0])


def test_a_cache_that_cannot_be_written_is_said(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match="cannot be kept in"):
        library(VARIANTS[0])


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEKEEPER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/a")
    assert build.cache_folder() == Path("/a/pagekeeper/kernels")
    monkeypatch.setenv("PAGEKEEPER_CACHE", "/b")
    assert build.cache_folder() == Path("/b/kernels")
    assert os.environ["PAGEKEEPER_CACHE"] == "/b"


def test_what_is_shipped_is_used_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = build.ship(tmp_path / "kernels")
    mine = [variant for variant in VARIANTS if platform.machine() in variant.machine]
    assert len(shipped) == len(mine) > 0
    assert {stat.S_IMODE(path.stat().st_mode) for path in shipped} == {0o755}
    assert stat.S_IMODE((tmp_path / "kernels").stat().st_mode) & 0o055 == 0o055
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("PAGEKEEPER_KERNELS", str(tmp_path / "kernels"))
    assert [library(variant) for variant in mine] == shipped
    # Shipped with another release: not taken for this one's.
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g0"))
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
        library(mine[0])


def test_a_cache_that_may_not_be_entered_is_said(
    fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(Unavailable, match=r"cannot be kept in .*Permission denied"):
        library(VARIANTS[0])


def test_a_user_without_a_home_is_told_what_to_set(
    fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PAGEKEEPER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(Unavailable, match="set HOME or PAGEKEEPER_CACHE"):
        library(VARIANTS[0])


def test_a_compiler_named_with_half_a_quotation_is_refused(
    fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++ '-O2")
    with pytest.raises(Unavailable, match="cannot be read: No closing quotation"):
        library(VARIANTS[0])


def test_a_compiler_may_complain_in_any_bytes(fake_compiler: Path) -> None:
    fake_compiler.write_text("#!/bin/sh\nprintf '\\377 error\\n' >&2\nexit 1\n")
    with pytest.raises(Unavailable, match="failed on the native step"):
        library(VARIANTS[0])


def test_a_compiler_that_writes_nothing_leaves_nothing(fake_compiler: Path) -> None:
    fake_compiler.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(Unavailable, match="wrote nothing"):
        library(VARIANTS[0])
    assert list(build.cache_folder().iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"library"])
def test_a_library_that_was_damaged_is_built_again(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not usable():
        pytest.skip("the native step does not know this kind of CPU")
    good = tmp_path / "good.so"
    try:
        shutil.copy(library(usable()[0]), good)
    except Unavailable as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(tmp_path / "cache"))
    made: list[Path] = []

    def copy(command: list[str], target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(good, target)
        made.append(target)

    monkeypatch.setattr(build, "_build", copy)
    path = library(usable()[0])
    path.write_bytes(content)
    assert native.load(usable()[0]).lanes > 0
    assert made == [path, path]


def test_a_shipped_library_that_cannot_be_loaded_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = VARIANTS[0]
    shipped = build._shipped(str(tmp_path), variant)
    shipped.write_bytes(b"library")
    monkeypatch.setenv("PAGEKEEPER_KERNELS", str(tmp_path))
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(Unavailable, match="cannot be loaded"):
        native.load(variant)
    assert shipped.exists()
