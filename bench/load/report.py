"""What a run's figures look like: a table, JSON, a CSV of requests, plots."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.load.chat import COLD
from bench.load.records import Record, Spread, Summary

SPREADS = ("ttft", "tpot", "itl", "normalised", "latency")
_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "normalised": "normalised latency",
    "latency": "latency",
}


def table(summary: Summary) -> str:
    """A run's figures for people."""
    lines = [
        f"{summary.completed} of {summary.requests} requests in {summary.seconds:.1f} s: "
        f"{summary.requests_per_s:.2f} requests/s, good {summary.goodput_per_s:.2f}/s, "
        f"{summary.output_tokens_per_s:.1f} output tokens/s, {summary.total_tokens_per_s:.1f} tokens/s",
        f"tokens: {summary.prompt_tokens} in ({summary.cached_tokens} of them cached), "
        f"{summary.output_tokens} out",
    ]
    if summary.completed:
        lines.append(f"{'ms':<24}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
        for name in SPREADS:
            spread: Spread = getattr(summary, name)
            values = (spread.mean, spread.p50, spread.p90, spread.p99)
            lines.append(f"{_NAMES[name]:<24}" + "".join(f"{value:>10.2f}" for value in values))
    lines += _groups(summary)
    if summary.short:
        lines.append(
            f"{summary.short} answers were shorter than asked for: does the server know ignore_eos? "
            "(--min-tokens)"
        )
    for kind, count in summary.errors.items():
        lines.append(f"failed: {count} x {kind}: {summary.examples[kind]}")
    return "\n".join(lines)


def _groups(summary: Summary) -> list[str]:
    """Requests by label, a conversation's last turns beside those of equal length with nothing cached."""
    cold = summary.groups.get(COLD)
    last = next((label for label in reversed(summary.groups) if label != COLD), "")
    lines = []
    for label, group in summary.groups.items():
        beside = ""
        if cold and label == last:
            beside = f"; {group.ttft.mean / cold.ttft.mean:.3f} of the cold ones' mean"
        lines.append(
            f"{label}: {group.completed} x {group.prompt_tokens:.0f} tokens, "
            f"{group.cached_tokens:.0f} of them cached; TTFT mean {group.ttft.mean:.1f} ms, "
            f"p50 {group.ttft.p50:.1f}{beside}"
        )
    return lines


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write figures; what is not a number becomes null."""
    path.write_text(json.dumps(_clean(content), indent=1) + "\n")


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def write_csv(path: Path, runs: Sequence[tuple[str, int, Sequence[Record]]]) -> None:
    """One row for each request of each run, given as server, round, records.

    Instants are seconds after a run's first request, durations milliseconds.
    """
    with path.open("w", newline="") as file:
        write = csv.writer(file)
        write.writerow(
            ["server", "round", "sent_s", "label", "wanted", "error", "message", "prompt_tokens",
             "cached_tokens", "output_tokens", "ttft_ms", "tpot_ms", "latency_ms", "normalised_ms"]
        )  # fmt: skip
        for server, number, records in runs:
            began = min((record.sent for record in records), default=0.0)
            for record in sorted(records, key=lambda record: record.sent):
                row = [server, number, f"{record.sent - began:.4f}", record.label, record.wanted]
                write.writerow([*row, record.error, record.message, *_measured(record)])


def _measured(record: Record) -> list[object]:
    if not record.ok:
        return []
    times = (record.ttft, record.tpot, record.latency, record.normalised)
    tokens = [record.prompt_tokens, record.cached_tokens, record.output_tokens]
    return [*tokens, *(f"{value * 1e3:.3f}" for value in times)]


def plot(path: Path, runs: dict[str, Sequence[Record]]) -> None:
    """Draw each run: distributions of TTFT and of the time between tokens, tokens per second over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (ttft, itl, rate) = pyplot.subplots(1, 3, figsize=(15, 4.5))
    for name, records in runs.items():
        good = [record for record in records if record.ok]
        _cdf(ttft, name, [record.ttft * 1e3 for record in good])
        _cdf(itl, name, [gap * 1e3 for record in good for gap in record.gaps()])
        began = min((record.sent for record in good), default=0.0)
        rate.plot(*_per_second(good, began), label=name)
    for axes, title, x, y in (
        (ttft, "Time to first token", "ms", "share of requests"),
        (itl, "Between tokens", "ms", "share of gaps"),
        (rate, "Output tokens per second", "seconds", "tokens/s"),
    ):
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    # One legend for all, below: in the panels it would cover what it names.
    lines, names = ttft.get_legend_handles_labels()
    figure.legend(lines, names, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _cdf(axes: Any, name: str, values: list[float]) -> None:
    values.sort()
    axes.plot(values, [(place + 1) / len(values) for place in range(len(values))], label=name)


def _per_second(records: Sequence[Record], began: float) -> tuple[list[int], list[float]]:
    """Tokens that came in each second of a run, an event counting for its share of its answer."""
    last = max((record.arrivals[-1] for record in records), default=began)
    counts = [0.0] * (int(last - began) + 1)
    for record in records:
        share = record.output_tokens / len(record.arrivals)
        for arrival in record.arrivals:
            counts[int(arrival - began)] += share
    return list(range(len(counts))), counts
