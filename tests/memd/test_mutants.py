"""Plausible bugs, put into the core one at a time: the fuzz or a named scenario must notice each.

A mutant is the core's source with one line changed, loaded under other module names.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from memd.core import Memory
from tests.memd import driver, test_cases, test_core, test_rules
from tests.memd.fuzz import fuzz

MODULES = ("prefix", "tables", "pool", "steps", "core")
PACKAGE = "mutant_of_memd"
FOLDER = Path(inspect.getfile(Memory)).parent

# name: (module, what the source says, what the bug says)
MUTANTS: dict[str, tuple[str, str, str]] = {
    "a sequence can be freed twice": (
        "tables",
        "table = pool.sequences.pop(seq, None)",
        "table = pool.sequences.get(seq)",
    ),
    "a hit takes no reference": (
        "tables",
        "        for node in plan.hit.nodes:\n            pool.take(node)",
        "        pass",
    ),
    "the hash stays in the index at eviction": (
        "pool",
        "        self.index.remove(node)\n"
        "        self.nodes[block] = None\n"
        "        self.counters.evictions += 1",
        "        self.nodes[block] = None\n        self.counters.evictions += 1",
    ),
    "the block stays sealed at eviction": (
        "pool",
        "        self.nodes[block] = None\n        self.counters.evictions += 1",
        "        self.counters.evictions += 1",
    ),
    "a block that is still shared is given up": (
        "pool",
        "if not left:",
        "if left <= 1:",
    ),
    "a lookup does not compare tokens": (
        "prefix",
        "node.parent is parent and node.tokens == tokens",
        "node.parent is parent",
    ),
    "a lookup does not compare the parent": (
        "prefix",
        "node.parent is parent and node.tokens == tokens",
        "node.tokens == tokens",
    ),
    "a merge compares nothing but the hash": (
        "tables",
        "elif other.parent is node and other.tokens == tokens:",
        "elif other is not None:",
    ),
    "blocks are sealed before they are committed": (
        "tables",
        "full = computed // pool.block_size",
        "full = min(table.tokens, len(table.known) // 4) // pool.block_size",
    ),
    "a shared block is written in place": (
        "tables",
        "if pool.refs[last] > 1 or pool.nodes[last] is not None:",
        "if pool.nodes[last] is not None:",
    ),
    "a sealed block is written in place": (
        "tables",
        "if pool.refs[last] > 1 or pool.nodes[last] is not None:",
        "if pool.refs[last] > 1:",
    ),
    "the source of a copy is handed out in its own step": (
        "pool",
        "        if node.root.lru.pop(node.block, None) is not None:\n"
        "            self.quarantine[node.block] = None",
        "        return",
    ),
    "the source dropped by copy-on-write is handed out": (
        "tables",
        "pool.release_source(last)",
        "pool.release(last)",
    ),
    "the source of copy-on-write keeps its reference": (
        "tables",
        "pool.release_source(last)",
        "pass",
    ),
    "copy-on-write copies the wrong way": (
        "tables",
        "copies.append(Copy(last, target))",
        "copies.append(Copy(target, last))",
    ),
    "tenants share their prefixes": (
        "prefix",
        "root = self.roots.get(tenant)\n        if root is None:",
        "root = next(iter(self.roots.values()), None)\n        if root is None:",
    ),
    "a hit may cover the whole prompt": (
        "prefix",
        "most = len(tokens) - TOKEN_BYTES",
        "most = len(tokens)",
    ),
    "a hit inside a block counts one token too many": (
        "prefix",
        "return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)",
        "return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES) + 1",
    ),
    "a chain is freed head first": (
        "pool",
        "for block in reversed(blocks):",
        "for block in blocks:",
    ),
    "the youngest block is evicted": (
        "pool",
        "block, _ = lru.popitem(last=False)\n"
        "        node = self.nodes[block]\n"
        "        assert node is not None  #",
        "block, _ = lru.popitem(last=True)\n"
        "        node = self.nodes[block]\n"
        "        assert node is not None  #",
    ),
    "quarantined blocks are lost": (
        "pool",
        "            self._stamp += 1\n"
        "            node.root.lru[block] = self._stamp\n"
        "        self.quarantine.clear()",
        "            pass\n        self.quarantine.clear()",
    ),
    "a merge keeps the merged block": ("tables", "        pool.release(block)\n", ""),
    "a merge found late is never told": (
        "steps",
        "tables.seal(pool, pool.late)",
        "tables.seal(pool, [])",
    ),
    "a merge found late is told of a sequence that ended": (
        "steps",
        "if change.seq not in gone",
        "if change.seq",
    ),
    "a sequence ends before its last blocks are sealed": (
        "steps",
        "if pool.unsealed and (step.frees or step.forks or step.admits):",
        "if pool.unsealed and (step.forks or step.admits):",
    ),
    "an admission does not see what its own step commits": (
        "steps",
        "if pool.unsealed and (step.frees or step.forks or step.admits):",
        "if pool.unsealed and step.frees:",
    ),
    "what waits to be sealed is forgotten": (
        "tables",
        "        _seal(pool, table, full, sent, changes)\n    pool.unsealed",
        "        pass\n    pool.unsealed",
    ),
    "blocks kept free are taken from a reserve": (
        "pool",
        "min(missing, self.available(self.common) - self.free_blocks())",
        "min(missing, self.cached_blocks())",
    ),
    "blocks are kept free and stay sealed": (
        "pool",
        "self.free.append(self._evict(self.common))",
        "self.free.append(next(iter(self.common)))",
    ),
    "a merge takes no reference": (
        "tables",
        "        pool.take(node)\n        sharer",
        "        sharer",
    ),
    "a merge forgets the forks that share the block": (
        "tables",
        "sharers = [kin for kin in table.kin if len(kin.blocks) > i and kin.blocks[i] == block]",
        "pass",
    ),
    "a merge is not told": (
        "tables",
        "changes.append(Change(sharer.seq, i, [node.block]))",
        "pass",
    ),
    "a fork takes no references": ("tables", "pool.refs[block] += 1", "pass"),
    "a fork's child is as far as its parent": (
        "tables",
        "computed=min(parent.computed, at),",
        "computed=parent.computed,",
    ),
    "a fork's child keeps the parent's later tokens": (
        "tables",
        "known=parent.known[: at * TOKEN_BYTES],",
        "known=parent.known[:],",
    ),
    "blocks that are hit count as free for the same group": (
        "tables",
        "pool.available(lru) - len(kept)",
        "pool.available(lru)",
    ),
    "an append takes blocks that are not there": (
        "tables",
        "need > (available := pool.available(lru))",
        "need > 1 + (available := pool.available(lru))",
    ),
    "after a refused admission later ones slip through": (
        "steps",
        "behind = bool(refusals)",
        "behind = False",
    ),
    "one sequence may be freed twice in a step": (
        "steps",
        "if len(set(frees)) != len(frees):",
        "if False:",
    ),
    "a free of an unknown sequence is accepted": (
        "steps",
        "if (last := max(frees)) > pool.highest:",
        "if (last := max(frees)) < 0:",
    ),
    "a commit may run ahead of the table": ("steps", "<= computed <= room", "<= computed"),
    "a repeated step is done again": (
        "core",
        "if step.number != pool.number + 1:",
        "if step.number not in (pool.number, pool.number + 1):",
    ),
    "a skipped step is not noticed": (
        "core",
        "if step.number != pool.number + 1:",
        "if step.number <= pool.number:",
    ),
    "another epoch's step is obeyed": (
        "core",
        "or step.epoch != self.epoch:",
        "or step.epoch < 0:",
    ),
    "a lease never ends": (
        "core",
        "if pool is not None and not self.leases.alive(pool.generation, now):\n"
        '            self._end(pool, "lease")\n'
        "            pool = None\n"
        "        if pool is None or pool.instance != step.instance",
        "if pool is None or pool.instance != step.instance",
    ),
    "another tenant's reserve is evicted": (
        "pool",
        "and len(other) <= self.reserves[tenant]",
        "and len(other) <= 0",
    ),
    "a pin takes no reference": (
        "pool",
        "            self.take(node)\n            self.pins",
        "            self.pins",
    ),
    "the columns start at the null block": (
        "pool",
        "            block = len(self.refs)\n            self.refs.append(1)",
        "            block = len(self.refs) - 1\n            self.refs.append(1)",
    ),
}


def load(module: str, old: str, new: str) -> type[Memory]:
    """The core with one change, as a class of its own."""
    for name in MODULES:
        source = (FOLDER / f"{name}.py").read_text()
        if name == module:
            assert source.count(old) == 1, (
                f"memd/{name}.py has this {source.count(old)} times: {old}"
            )
            source = source.replace(old, new)
        for other in MODULES:
            source = source.replace(f"from memd.{other} import", f"from {PACKAGE}.{other} import")
        source = source.replace("from memd import tables", f"from {PACKAGE} import tables")
        source = source.replace(
            "from memd import invariants, snapshot, steps",
            f"from memd import invariants, snapshot\nfrom {PACKAGE} import steps",
        )
        loaded = ModuleType(f"{PACKAGE}.{name}")
        sys.modules[loaded.__name__] = loaded
        setattr(sys.modules[PACKAGE], name, loaded)
        exec(compile(source, loaded.__name__, "exec"), loaded.__dict__)
    memory: type[Memory] = importlib.import_module(f"{PACKAGE}.core").Memory
    assert memory is not Memory
    return memory


@pytest.fixture(autouse=True)
def package() -> Iterator[None]:
    """The mutated modules live for one test."""
    sys.modules[PACKAGE] = ModuleType(PACKAGE)
    yield
    for name in (PACKAGE, *(f"{PACKAGE}.{module}" for module in MODULES)):
        sys.modules.pop(name, None)


def scenarios() -> list[Callable[[], None]]:
    """Every test of rules, cases and protocol that takes no arguments."""
    return [
        test
        for module in (test_rules, test_core, test_cases)
        for name, test in vars(module).items()
        if name.startswith("test_") and not inspect.signature(test).parameters
    ]


def suite(build: type[Memory]) -> None:
    """A short fuzz with whole and with cut hashes, then the named scenarios."""
    for seed in range(6):
        fuzz(seed, 1_200, build, (256, 256, 4)[seed % 3])
    for scenario in scenarios():
        scenario()


def test_the_suite_passes_on_the_core_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    build = load("core", "MOST_POOLS = 64", "MOST_POOLS = 65")
    monkeypatch.setattr(driver, "Memory", build)
    assert len(scenarios()) > 40
    suite(build)


@pytest.mark.parametrize("bug", MUTANTS)
def test_the_suite_notices(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = load(*MUTANTS[bug])
    monkeypatch.setattr(driver, "Memory", build)
    with pytest.raises((Exception, pytest.fail.Exception)):
        suite(build)
