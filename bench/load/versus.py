"""Two servers, measured in turns, and what one is of the other.

A machine's speed changes from minute to minute, so only figures taken side by side are compared: each round
measures one server and then the other with the same requests, and gives one ratio for each figure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.load.records import Summary


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of two servers over all rounds.

    Attributes:
        first, second: the figure in each round.
        ratio, least, most: median, smallest and largest of the rounds' ratios, first to second.
    """

    name: str
    better: Literal["higher", "lower"]
    first: list[float]
    second: list[float]
    ratio: float
    least: float
    most: float


def figures(summary: Summary) -> dict[str, float]:
    """What is compared, by name. Names that end in "/s" are rates, better when higher; others durations."""
    values = {
        "requests/s": summary.requests_per_s,
        "good requests/s": summary.goodput_per_s,
        "output tokens/s": summary.output_tokens_per_s,
        "TTFT mean ms": summary.ttft.mean,
        "TTFT p50 ms": summary.ttft.p50,
        "TTFT p99 ms": summary.ttft.p99,
        "TPOT mean ms": summary.tpot.mean,
        "TPOT p99 ms": summary.tpot.p99,
        "ITL p50 ms": summary.itl.p50,
        "ITL p99 ms": summary.itl.p99,
        "normalised latency mean ms": summary.normalised.mean,
        "latency p50 ms": summary.latency.p50,
        "latency p99 ms": summary.latency.p99,
    }
    values |= {f"TTFT mean ms, {label}": group.ttft.mean for label, group in summary.groups.items()}
    return values


def compare(
    first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]]
) -> list[Comparison]:
    """Set the rounds of two servers side by side; figures that one of them lacks are left out."""
    names = [name for name in first[0] if all(name in values for values in (*first, *second))]
    return [
        _compare(name, [values[name] for values in first], [values[name] for values in second])
        for name in names
    ]


def _compare(name: str, first: list[float], second: list[float]) -> Comparison:
    ratios = [_ratio(a, b) for a, b in zip(first, second, strict=True)]
    known = [ratio for ratio in ratios if not math.isnan(ratio)] or [math.nan]
    return Comparison(
        name,
        "higher" if name.endswith("/s") else "lower",
        first,
        second,
        statistics.median(known),
        min(known),
        max(known),
    )


def _ratio(first: float, second: float) -> float:
    return first / second if second else math.nan


def table(comparisons: Sequence[Comparison], names: tuple[str, str]) -> str:
    """All figures in one table: medians of the rounds, and the ratio with its spread."""
    width = max(len(comparison.name) for comparison in comparisons)
    rounds = len(comparisons[0].first)
    ratios = f"medians of {rounds} rounds; A / B of the rounds' own ratios"
    lines = [
        f"A = {names[0]}",
        f"B = {names[1]}; {ratios if rounds > 1 else 'one round'}",
        f"{'':<{width}}{'A':>12}{'B':>12}{'A / B':>10}{'(min - max)':>18}   better",
    ]
    for each in comparisons:
        spread = f"({each.least:.2f} - {each.most:.2f})"
        lines.append(
            f"{each.name:<{width}}{statistics.median(each.first):>12.2f}"
            f"{statistics.median(each.second):>12.2f}{each.ratio:>10.2f}{spread:>18}   {each.better}"
        )
    return "\n".join(lines)
