"""One step on one pool: look at the whole of it, then do it.

`problem` finds what makes a step invalid before anything has changed, so that a bad step is refused whole;
`apply` can then no longer fail, except that single items lack blocks; `settle` does afterwards what no part
of the reply depends on. Order: commits, fills, frees, forks, appends, admits. Blocks that commits filled are
sealed before the frees where the step has frees, forks or admits, which look at what is sealed, and by
`settle` where it has none.
"""

from __future__ import annotations

from itertools import groupby
from struct import iter_unpack

from memd import tables
from memd.pool import Pool
from memd.prefix import TOKEN_BYTES
from memd.tables import Table
from wire.errors import Code
from wire.memory import Admit, Admitted, Change, Commit, Copy, Refusal, Step, Usage

_PAIR = "<QQ"  # one entry of `Step.fills`: sequence, tokens
_PAIR_BYTES = 16

Problem = tuple[Code, str]


def problem(pool: Pool, step: Step) -> Problem | None:
    """Why the step must be refused whole, or None. Changes nothing.

    Ids: a sequence lives from its admit or fork to its free. An id up to the highest ever named may be freed
    again without effect, and may come back once it is dead; an id never named is unknown.
    """
    return (
        (step.commits and _bad_commits(pool, step.commits))
        or (step.fills and _bad_fills(pool, step))
        or (step.frees and _bad_frees(pool, step))
        or ((step.forks or step.appends or step.admits) and _bad_growth(pool, step))
        or None
    )


def _unknown(seq: int, what: str) -> Problem:
    return (
        Code.UNKNOWN_SEQUENCE,
        f"{what} names sequence {seq}, which is not alive; free or admit it first",
    )


def _twice(seq: int, what: str) -> Problem:
    return Code.DUPLICATE, f"{what} name sequence {seq} twice in one step; send it once"


def _repeated(ids: list[int]) -> int:
    """The first id that occurs a second time."""
    seen: set[int] = set()
    for seq in ids:
        if seq in seen:
            return seq
        seen.add(seq)
    return 0


def _bad_commits(pool: Pool, commits: list[Commit]) -> Problem | None:
    size, sequences = pool.block_size, pool.sequences
    most = pool.total * size * TOKEN_BYTES
    if len(commits) > 1 and len({item.seq for item in commits}) != len(commits):
        return _twice(_repeated([item.seq for item in commits]), "commits")
    for item in commits:
        table = sequences.get(item.seq)
        if table is None:
            return _unknown(item.seq, "a commit")
        computed, sent = item.computed, len(item.tokens)
        room = table.tokens if table.borrowed else len(table.blocks) * size
        if (
            not table.computed <= computed <= room
            or not computed * TOKEN_BYTES <= len(table.known) + sent <= most
            or sent % TOKEN_BYTES
        ):
            return (
                Code.INVALID,
                f"commit of sequence {item.seq} {_why_bad(table, item, room, most)}",
            )
    return None


def _why_bad(table: Table, item: Commit, room: int, most: int) -> str:
    """The first rule an invalid commit breaks; `most` is the pool in bytes of token ids."""
    computed, sent = item.computed, len(item.tokens)
    if sent % TOKEN_BYTES:
        return f"carries {sent} bytes of tokens; ids are {TOKEN_BYTES} bytes each"
    if computed < table.computed:
        return f"goes back from {table.computed} to {computed} tokens; it can only rise"
    if computed > room:
        return f"says {computed} tokens are computed, past its room of {room}; append first"
    known = (len(table.known) + sent) // TOKEN_BYTES
    if computed > known:
        return (
            f"says {computed} tokens are computed but {known} ids are known; send the ids with it"
        )
    return f"brings it to {known} ids, more than the pool's {most // TOKEN_BYTES} slots"


def _bad_fills(pool: Pool, step: Step) -> Problem | None:
    if len(step.fills) % _PAIR_BYTES:
        return Code.INVALID, f"fills have {len(step.fills)} bytes; a pair has {_PAIR_BYTES}"
    for seq, tokens in iter_unpack(_PAIR, step.fills):
        table = pool.sequences.get(seq)
        if table is None:
            return _unknown(seq, "a fill")
        room = table.room(pool.block_size)
        if tokens > room:
            return (
                Code.INVALID,
                f"fill of sequence {seq} says {tokens} tokens, past its room of {room}",
            )
    return None


def _bad_frees(pool: Pool, step: Step) -> Problem | None:
    frees = step.frees
    if len(set(frees)) != len(frees):
        return _twice(_repeated(frees), "frees")
    if (last := max(frees)) > pool.highest:
        return Code.UNKNOWN_SEQUENCE, (
            f"a free names sequence {last}, but the highest id so far is {pool.highest}"
        )
    return None


def _bad_growth(pool: Pool, step: Step) -> Problem | None:
    sequences, size = pool.sequences, pool.block_size
    dead = set(step.frees) if step.frees else ()
    # Tables as they will be when forks are made: room and tokens of children of this very step.
    born: dict[int, int] = {}
    for fork in step.forks:
        if fork.parent in born:
            room = born[fork.parent]
        else:
            parent = sequences.get(fork.parent)
            if parent is None or fork.parent in dead:
                return _unknown(fork.parent, "a fork")
            room = parent.room(size)
        if fork.at > room:
            return Code.INVALID, (
                f"fork of sequence {fork.parent} at {fork.at} tokens is past its room of {room}"
            )
        if fork.child in born or (fork.child in sequences and fork.child not in dead):
            return Code.DUPLICATE, f"fork's child {fork.child} is an id in use; take a new one"
        born[fork.child] = fork.at
    appends = step.appends
    if len(appends) > 1 and len({item.seq for item in appends}) != len(appends):
        return _twice(_repeated([item.seq for item in appends]), "appends")
    for item in appends:
        if (item.seq not in sequences or item.seq in dead) and item.seq not in born:
            return _unknown(item.seq, "an append")
    admitted: set[int] = set()
    for admit in step.admits:
        seq = admit.seq
        if seq in admitted or seq in born or (seq in sequences and seq not in dead):
            return Code.DUPLICATE, f"admission names sequence {seq}, an id in use; take a new one"
        admitted.add(seq)
        if not admit.tokens or len(admit.tokens) % TOKEN_BYTES:
            return Code.INVALID, (
                f"admission of sequence {seq} carries {len(admit.tokens)} bytes of tokens; ids are 4 bytes "
                "each, and at least one is needed"
            )
    for before, after in zip(step.admits, step.admits[1:], strict=False):
        if before.group and before.group == after.group and before.tenant != after.tenant:
            return Code.INVALID, f"group {after.group} has members of two tenants; split it"
    return None


def apply(pool: Pool, step: Step) -> tuple[list[Change], list[Copy], list[Admitted], list[Refusal]]:
    """Carry out a step without a `problem`; `settle` must follow before anything else is done to the pool."""
    changes, pool.late = pool.late, []
    if changes and step.frees:
        gone = set(step.frees)
        changes = [change for change in changes if change.seq not in gone]
    copies: list[Copy] = []
    admitted: list[Admitted] = []
    refused: list[Refusal] = []
    if pool.quarantine:
        pool.end_quarantine()
    for commit in step.commits:
        tables.commit(pool, commit)
    if pool.unsealed and (step.frees or step.forks or step.admits):
        tables.seal(pool, changes)
    if step.fills:
        for seq, tokens in iter_unpack(_PAIR, step.fills):
            table = pool.sequences[seq]
            # A lower count is no error: an append has counted slots that the step then left empty.
            table.tokens = max(table.tokens, tokens)
    for seq in step.frees:
        tables.free(pool, seq)
    for fork in step.forks:
        tables.fork(pool, fork, changes)
        pool.highest = max(pool.highest, fork.child)
    for append in step.appends:
        refusal = tables.append(pool, append, changes, copies)
        if refusal is not None:
            refused.append(refusal)
    if step.admits:
        _admits(pool, step.admits, copies, admitted, refused)
        pool.highest = max(pool.highest, max(item.seq for item in step.admits))
    pool.counters.steps += 1
    pool.counters.refusals += len(refused)
    return changes, copies, admitted, refused


def settle(pool: Pool) -> None:
    """Finish a step whose reply may be on its way: seal, and have blocks ready for the next one.

    A merge found here is told by the next reply. Until then the executor's table names the merged block, and
    its content stays: it can be granted by that same reply at the earliest, which the device obeys later.
    """
    if pool.unsealed:
        tables.seal(pool, pool.late)
    pool.top_up()


def _admits(
    pool: Pool,
    admits: list[Admit],
    copies: list[Copy],
    admitted: list[Admitted],
    refused: list[Refusal],
) -> None:
    """Admit group after group until one is refused; a sequence without a group is a group of one."""
    behind = False
    for _, neighbours in groupby(
        admits, key=lambda item: (item.group, 0 if item.group else item.seq)
    ):
        group = list(neighbours)
        if behind:
            refused += [Refusal(item.seq, Code.BEHIND, 0, 0) for item in group]
            continue
        refusals = _admit_group(pool, group, copies, admitted)
        behind = bool(refusals)
        refused += refusals


def _admit_group(
    pool: Pool, group: list[Admit], copies: list[Copy], admitted: list[Admitted]
) -> list[Refusal]:
    """Admit all members, or none and say why for each."""
    lru = pool.lru_of(group[0].tenant)
    most = pool.most_for(lru)
    whole = max(-(-len(item.tokens) // (TOKEN_BYTES * pool.block_size)) for item in group)
    if whole > most:
        return [Refusal(item.seq, Code.NEVER_FITS, whole, most) for item in group]
    # A hit inside a block needs the copied block as well as the copy; where that is too much, do without.
    for inside in (True, False):
        plans = [tables.plan_admit(pool, item, inside) for item in group]
        need, available = tables.lacking(pool, plans, lru)
        if need <= available:
            admitted += tables.admit(pool, plans, copies)
            return []
        if all(plan.hit.source is None for plan in plans):
            break
    return [Refusal(item.seq, Code.NO_BLOCKS, need, available) for item in group]


def usage(pool: Pool) -> Usage:
    """The pool's state as it travels."""
    counts = pool.counts()
    return Usage(
        counts.total,
        counts.free,
        counts.cached,
        counts.used,
        counts.quarantined,
        pool.counters.hits,
        pool.counters.queries,
    )
