"""A pool's complete state as plain values in a canonical order, for digests and comparisons."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from memd.pool import Pool


def digest(state: Any) -> bytes:
    """32 bytes of a tree of plain values."""
    return blake2b(msgspec.msgpack.encode(state), digest_size=32).digest()


def state(pool: Pool) -> list[Any]:
    """All of it: what two pools share here, they share in every later answer."""
    return [
        pool.spec,
        pool.generation,
        pool.instance,
        pool.number,
        pool.reply,
        pool.highest,
        pool.counters.as_dict(),
        memory(pool),
    ]


def memory(pool: Pool) -> list[Any]:
    """Blocks, tables and index alone, without identity, counters and last reply."""
    nodes = [node for node in pool.nodes if node is not None]
    return [
        pool.refs,
        pool.grants,
        pool.free,
        [list(lru.items()) for lru in (pool.common, *pool.reserved.values())],
        list(pool.quarantine),
        sorted(pool.pins.items()),
        pool.late,
        [
            [
                node.block,
                node.parent.block if node.parent is not None else 0,
                node.root.tenant,
                node.tokens,
                node.key,
                [child.block for child in node.offspring()],
            ]
            for node in nodes
        ],
        [
            [tenant, root.key, root.tables, [child.block for child in root.offspring()]]
            for tenant, root in sorted(pool.index.roots.items())
        ],
        sorted((key, node.block) for key, node in pool.index.by_key.items()),
        [
            [
                seq,
                table.tenant,
                table.blocks,
                table.tokens,
                table.known,
                table.computed,
                table.sealed,
                table.borrowed,
                table.lent,
                -1 if table.node is None else table.node.block,
                [kin.seq for kin in table.kin],
            ]
            for seq, table in sorted(pool.sequences.items())
        ],
    ]
