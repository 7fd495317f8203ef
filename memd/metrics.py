"""`/metrics`: computed from the live state at every scrape, so that no gauge can drift from the truth.

Every name that memd exports is in this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from memd.pool import Pool
from memd.server import BUCKETS, Server
from memd.views import share_filled, share_saved

# Counters of a pool by their field in `memd.pool.Counters`; they start over when the pool registers again.
_POOL_COUNTERS = (
    ("steps", "memd_steps", "Steps granted"),
    ("hits", "memd_prefix_hit_tokens", "Prompt tokens found in the prefix index"),
    ("queries", "memd_prefix_query_tokens", "Prompt tokens looked up"),
    ("copies", "memd_block_copies", "Block copies ordered: copy-on-write, hits inside a block"),
    ("evictions", "memd_block_evictions", "Cached blocks whose content was given up"),
    ("merges", "memd_block_merges", "Blocks given back because an equal one was sealed already"),
    ("seals", "memd_block_seals", "Blocks indexed"),
    ("refusals", "memd_refusals", "Appends and admissions that lacked blocks"),
)


class MemoryCollector(Collector):
    """Reads a server and its core; takes time in proportion to live sequences, not to blocks."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        pools = list(self._server.memory.pools.values())
        yield from self._gauges(pools)
        for field, name, text in _POOL_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["pool"])
            for pool in pools:
                counter.add_metric([pool.name], getattr(pool.counters, field))
            yield counter
        yield from self._process()

    def _gauges(self, pools: list[Pool]) -> Iterable[Metric]:
        blocks = GaugeMetricFamily("memd_blocks", "Blocks by state", labels=["pool", "state"])
        sequences = GaugeMetricFamily("memd_sequences", "Live sequences", labels=["pool"])
        block_bytes = GaugeMetricFamily("memd_block_bytes", "Size of a block", labels=["pool"])
        age = GaugeMetricFamily(
            "memd_lease_age_seconds", "Since the holder's last valid message", labels=["pool"]
        )
        filled = GaugeMetricFamily(
            "memd_slots_filled_ratio", "Share of used blocks' slots that hold data", labels=["pool"]
        )
        saved = GaugeMetricFamily(
            "memd_sharing_saved_ratio", "Share of blocks saved by sharing", labels=["pool"]
        )
        leases, now = self._server.memory.leases, self._server.clock()
        for pool in pools:
            counts = pool.counts()
            for state in ("free", "cached", "used", "quarantined"):
                blocks.add_metric([pool.name, state], getattr(counts, state))
            sequences.add_metric([pool.name], len(pool.sequences))
            block_bytes.add_metric([pool.name], pool.spec.block_bytes)
            age.add_metric(
                [pool.name], max(0.0, leases.length - leases.remaining(pool.generation, now))
            )
            for family, value in ((filled, share_filled(pool)), (saved, share_saved(pool))):
                # Of nothing there is no share: not a number, rather than a series that comes and goes.
                family.add_metric([pool.name], math.nan if value is None else value)
        yield from (blocks, sequences, block_bytes, age, filled, saved)

    def _process(self) -> Iterable[Metric]:
        meter, memory = self._server.meter, self._server.memory
        yield GaugeMetricFamily("memd_epoch", "Rises with every start", value=memory.epoch)
        yield GaugeMetricFamily("memd_leases", "Live registrations", value=len(memory.pools))
        for name, text, value in (
            ("memd_messages", "Messages understood", meter.messages),
            ("memd_bad_frames", "Messages not understood", meter.bad_frames),
            ("memd_dropped_messages", "Messages of peers not heard any more", meter.dropped),
            ("memd_internal_errors", "Bugs met", meter.internal_errors),
            ("memd_pauses", "Times this process stood still", self._server.clock.pauses),
        ):
            yield CounterMetricFamily(name, text, value=value)
        unsent = CounterMetricFamily("memd_unsent_replies", "Replies not sent", labels=["reason"])
        unsent.add_metric(["gone"], meter.peer_gone)
        unsent.add_metric(["slow"], meter.peer_slow)
        yield unsent
        rejected = CounterMetricFamily("memd_rejected", "Messages refused whole", labels=["code"])
        for code, count in sorted(meter.rejected.items()):
            rejected.add_metric([code], count)
        yield rejected
        ended = CounterMetricFamily(
            "memd_leases_ended", "Registrations that are over", labels=["reason"]
        )
        for reason in ("lease", "goodbye", "replaced"):
            ended.add_metric([reason], meter.leases_ended[reason])
        yield ended
        bounds = [*map(str, BUCKETS), "+Inf"]
        yield HistogramMetricFamily(
            "memd_step_seconds",
            "Time to decode, handle and answer one step",
            buckets=list(zip(bounds, accumulate(meter.step_buckets), strict=True)),
            sum_value=meter.step_seconds,
        )


def registry(server: Server) -> CollectorRegistry:
    """A registry of its own, with nothing of the process's default one in it."""
    made = CollectorRegistry()
    made.register(MemoryCollector(server))
    return made
