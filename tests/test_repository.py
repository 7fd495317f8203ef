"""Rules of the whole repository that no linter has: what code may not do, and what text may not say."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("wire", "memd", "kernels", "executor", "gateway", "pagekeeper")
SOURCES = sorted(path for package in PRODUCT for path in (ROOT / package).rglob("*.py"))

# Each turns bytes into code, or runs text as code.
FORBIDDEN_MODULES = frozenset(
    {"pickle", "cPickle", "marshal", "dill", "cloudpickle", "shelve", "joblib"}
)
FORBIDDEN_CALLS = frozenset({"eval", "exec", "__import__"})
FORBIDDEN_METHODS = frozenset({"recv_pyobj", "send_pyobj"})
FORBIDDEN_DOTTED = frozenset(
    {"torch.load", "torch.save", "numpy.load", "np.load", "os.system", "yaml.load"}
)
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".yaml",
    ".txt",
    ".html",
    ".css",
    ".js",
    ".svg",
    ".cpp",
    ".h",
    ".sh",
    "",
}


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in `tree` that is forbidden in product code."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.split(".")[0] in FORBIDDEN_MODULES:
                        yield node.lineno, f"import {alias.name}"
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN_MODULES:
                yield node.lineno, f"from {module} import …"
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                yield node.lineno, f"{name}(…)"
            case ast.Attribute(attr=name) if name in FORBIDDEN_METHODS:
                yield node.lineno, f".{name}"
            case ast.Attribute() if ast.unparse(node) in FORBIDDEN_DOTTED:
                yield node.lineno, ast.unparse(node)
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield node.value.lineno, "shell=True"
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                yield node.value.lineno, "trust_remote_code=True"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import os, pickle as p",
        "from dill import loads",
        "socket.recv_pyobj()",
        "torch.load(path)",
        "x = eval(text)",
        "subprocess.run(c, shell=True)",
        "load(trust_remote_code=True)",
    ],
)
def test_the_gate_sees_each_forbidden_thing(code: str) -> None:
    assert list(offences(ast.parse(code)))


def test_the_gate_lets_ordinary_code_pass() -> None:
    assert not list(
        offences(ast.parse("import json\nmodel.eval()\nre.compile('x').match(y)\njson.load(f)"))
    )


def test_product_code_turns_no_bytes_into_code() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in SOURCES
        for line, what in offences(ast.parse(path.read_text()))
    ]
    assert found == []


def test_every_product_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_no_assert_guards_product_code_against_users() -> None:
    """`python -O` removes asserts, so none may be the only check of a value from outside; those that tell the
    type checker what holds anyway are of the form `assert … is not None` or `isinstance`."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                text = ast.unparse(node.test)
                if not text.endswith("is not None") and not text.startswith("isinstance("):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: assert {text}")
    assert found == []


def tracked() -> list[Path]:
    """Text files of the repository; those that builds and tools leave are not."""
    left_out = {".git", ".venv", "build", "dist", "__pycache__", "models", "node_modules"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and path.suffix in TEXT
        and not any(
            part in left_out or part.endswith((".egg-info", "_cache")) for part in path.parts
        )
        and ".hypothesis" not in path.parts
    ]


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    # /home/…, /Users/… and the like; a path in a container (/root, /opt) has a reason and is not looked for.
    machine = re.compile(r"(?<![\w.])/(?:home|Users|work|mnt|media)/\w+")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {hit.group()}"
        for path in tracked()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if (hit := machine.search(line))
    ]
    assert found == []


def test_every_direct_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"]]
    for name in extras.keys() - {"model"}:
        wanted += extras[name]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {_name(line) for line in pins if "==" in line}
    assert {_name(requirement) for requirement in wanted} - pinned == set()


def _name(requirement: str) -> str:
    """Of a requirement, as package indexes compare it."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[._-]+", "-", found.group()).lower() if found else ""


def test_markdown_links_lead_somewhere() -> None:
    link = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")
    dead = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in tracked()
        if path.suffix == ".md"
        for target in link.findall(path.read_text())
        if not (path.parent / target).exists()
    ]
    assert dead == []
