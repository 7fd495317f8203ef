"""Fig. 12: normalised latency against request rate, and the rate each policy sustains.

Each policy is first flooded for some minutes, which gives the rate it can serve at most; then it is
measured at shares of that, so that every curve has its points where it bends. A run whose oldest request
has waited for more than `PATIENCE` is over the limit and is stopped.

    python -m bench.paper.latency [--models 13b,66b,175b] [--datasets sharegpt,alpaca] [--minutes 15]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.paper import published, report
from bench.paper.device import MODELS, Device
from bench.paper.play import Outcome, simulate
from bench.paper.policies import Policy
from bench.paper.workload import Pair, Request, poisson

FLOOD = 100.0, 120.0  # requests a second, seconds
SHARES = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)  # of the most a policy can serve
LIMIT = 0.2  # seconds a token: the latency at which rates are compared
PATIENCE = 240.0  # seconds

Play = Callable[[Sequence[Request], str, float], Outcome]  # requests, progress, when to end
Curve = list[tuple[float, float]]  # requests a second, normalised latency


def curve(
    play: Play,
    draw: Callable[[float, float], list[Request]],
    seconds: float,
    name: str,
    *,
    flood: tuple[float, float] = FLOOD,
    shares: Sequence[float] = SHARES,
) -> Curve:
    """Measured points of one policy, by rate.

    Args:
        draw: requests at a rate for so many seconds.
        seconds: of arrivals at each point.
        flood: requests a second and seconds of the run that finds the most it can serve.
    """
    rate, until = flood[0], min(flood[1], seconds)
    requests = draw(rate, until)
    outcome = play(requests, f"{name} flooded", until)
    most = outcome.token_rate / float(np.mean([request.output for request in requests]))
    points: Curve = []
    for share in shares:
        done = play(draw(share * most, seconds), f"{name} at {share * most:.2f}/s", math.inf)
        points.append((share * most, done.normalized))
        if math.isinf(done.normalized):
            break
    return points


def simulated(policy: Policy, device: Device, *, reuse: bool = True, longest: int = 2048) -> Play:
    """A `Play` on a device of the paper."""

    def play(requests: Sequence[Request], progress: str, end: float) -> Outcome:
        patience = PATIENCE if math.isinf(end) else math.inf
        warm = 0.0 if math.isinf(end) else end / 4
        return simulate(
            requests,
            policy,
            device,
            reuse=reuse,
            longest=longest,
            patience=patience,
            warm=warm,
            end=end,
            progress=progress,
        )

    return play


def sustained(
    curves: Mapping[str, Curve], base: str, limit: float = LIMIT
) -> list[dict[str, object]]:
    """A row for each curve: the rate at the latency limit, and how many times it `base` serves."""
    rates = {name: report.at_latency(points, limit) for name, points in curves.items()}
    return [
        {
            "policy": name,
            "lowest s/token": points[0][1],
            f"req/s at {limit} s/token": rates[name],
            f"{base} serves": f"{rates[base] / rates[name]:.2f}x" if rates[name] else "",
        }
        for name, points in curves.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__, minutes=15)
    parser.add_argument("--models", default="13b", help=f"of {','.join(MODELS)} (%(default)s)")
    parser.add_argument("--datasets", default="sharegpt,alpaca")
    options = parser.parse_args(argv)
    for dataset in options.datasets.split(","):
        pairs = report.lengths(dataset, options)
        for model in options.models.split(","):
            measure(pairs, dataset, model, options.minutes, options.seed, options.out)
    return 0


def measure(
    pairs: Sequence[Pair], dataset: str, model: str, minutes: float, seed: int, out: Path | None
) -> None:
    """All policies on one model and data set."""
    device = MODELS[model]
    curves: dict[str, Curve] = {}
    for policy in Policy:
        curves[policy.value] = curve(
            simulated(policy, device),
            lambda rate, seconds: poisson(pairs, rate, seconds, seed),
            60 * minutes,
            f"{model} {dataset} {policy.value}",
        )
    name = f"latency-{dataset}-{model}"
    publish_curves(name, f"{dataset}, {device.name} (Fig. 12)", curves, out)
    rows = sustained(curves, Policy.PAGED.value)
    if dataset == "sharegpt":
        for row, policy in zip(rows, Policy, strict=True):
            low, high = published.SUSTAINED.get(policy, (0.0, 0.0))
            row["paper, 3 models"] = f"{low}-{high}x" if low else ""
    report.publish(f"{name}-sustained", "Rate at equal latency", rows, out)


def publish_curves(
    name: str,
    title: str,
    curves: Mapping[str, Curve],
    out: Path | None,
    limit: float = LIMIT,
) -> None:
    """All points as a table, and a plot of them; a load that was over the limit is not drawn."""
    rows = [
        {"policy": label, "req/s": rate, "s/token": latency}
        for label, points in curves.items()
        for rate, latency in points
    ]
    report.publish(name, f"Normalised latency, {title}", rows, out)
    made, (axis, *_) = report.figure()
    for label, points in curves.items():
        served = [point for point in points if math.isfinite(point[1])]
        color = report.COLORS.get(label, "tab:purple")
        axis.plot(*zip(*served, strict=True), marker=".", label=label, color=color)
    axis.axhline(limit, color="gray", linewidth=0.5, linestyle="--")
    axis.set_ylim(0, 5 * limit)
    axis.set_xlim(left=0)
    axis.set_xlabel("requests/s")
    axis.set_ylabel("normalised latency, s/token")
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=7)
    report.save(made, f"paper-{name}", out)


if __name__ == "__main__":
    sys.exit(main())
