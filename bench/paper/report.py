"""Tables for people (markdown on stdout), for machines (CSV) and plots, with the options all experiments
share."""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.paper.policies import Policy
from bench.paper.workload import Pair, alpaca, sharegpt

Row = Mapping[str, object]

COLORS: dict[str, str] = {
    Policy.PAGED: "tab:blue",
    Policy.ORACLE: "tab:green",
    Policy.POW2: "tab:orange",
    Policy.MAX: "tab:red",
}


def parser(description: str | None, *, minutes: float) -> argparse.ArgumentParser:
    """The options every experiment has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, help="folder for the CSV and the plot; default: neither")
    made.add_argument(
        "--minutes", type=float, default=minutes, help="of arrivals in each run (%(default)s)"
    )
    made.add_argument("--seed", type=int, default=1, help="of arrivals and lengths (%(default)s)")
    made.add_argument("--data", type=Path, help="ShareGPT's JSON; default: the lengths shipped")
    made.add_argument("--tokenizer", type=Path, help="tokenizer.json to count --data with")
    return made


def lengths(dataset: str, options: argparse.Namespace) -> list[Pair]:
    """Pairs of the named data set."""
    if dataset == "sharegpt":
        return sharegpt(options.data, tokenizer=options.tokenizer)
    return alpaca()


def text(value: object) -> str:
    """A cell: four significant digits are enough of any measurement."""
    if not isinstance(value, float):
        return str(value)
    if math.isinf(value):
        return "over"
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"


def publish(name: str, title: str, rows: Sequence[Row], out: Path | None) -> None:
    """Print a table, and write it as `name`.csv where a folder was asked for."""
    columns = list(rows[0])
    print(f"\n{title}\n")
    print(f"| {' | '.join(columns)} |")
    print("|" + "|".join("---:" if _is_number(rows[0][key]) else "---" for key in columns) + "|")
    for row in rows:
        print(f"| {' | '.join(text(row[key]) for key in columns)} |", flush=True)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: text(row[key]) for key in columns} for row in rows)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def figure(columns: int = 1) -> tuple[Any, list[Any]]:
    """A matplotlib figure and its axes, side by side."""
    import matplotlib  # only who plots needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, axes = pyplot.subplots(
        1, columns, figsize=(3.6 * max(columns, 1.6), 3.0), squeeze=False, layout="constrained"
    )
    return made, list(axes[0])


def save(made: Any, name: str, out: Path | None) -> None:
    """Write the figure as `name`.png where a folder was asked for."""
    from matplotlib import pyplot

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        made.savefig(out / f"{name}.png", dpi=100, metadata={"Software": None})
        print(f"\n{out / name}.png")
    pyplot.close(made)


def at_latency(points: Sequence[tuple[float, float]], limit: float) -> float:
    """The rate at which latency reaches `limit`, on straight lines between measured points.

    Args:
        points: (rate, latency) by rate; a latency may be infinite: the load was more than could be served.

    Returns:
        0 if even the first point is over the limit; the last rate if none is.
    """
    below: tuple[float, float] | None = None
    for rate, latency in points:
        if latency > limit:
            if below is None:
                return 0.0
            if math.isinf(latency):
                return below[0]
            share = (limit - below[1]) / (latency - below[1])
            return below[0] + share * (rate - below[0])
        below = (rate, latency)
    return below[0] if below else 0.0
