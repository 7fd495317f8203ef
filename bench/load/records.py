"""What one request was, and the figures that follow from its timestamps. No I/O, no clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Instants are seconds of one monotonic clock.

    Attributes:
        sent: when it was sent.
        arrivals: when each event with output arrived; several in one packet have the same instant.
        ended: when the response ended, in whatever way.
        wanted: output tokens asked for.
        output_tokens: as the server's usage says; the number of events where it said nothing.
        error: kind of failure, "" if none: "http 429", "disconnected", "error event" …
        message: what the server or the system said of it.
        label: what a report may group by, such as "turn 2".
        text: the output, where it was kept.
    """

    sent: float
    wanted: int
    label: str = ""
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    message: str = ""
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended as it should, with some output."""
        return not self.error

    @property
    def ttft(self) -> float:
        """Seconds to the first output."""
        return self.arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds to the last output."""
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; NaN for a single token."""
        if self.output_tokens < 2:
            return math.nan
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def normalised(self) -> float:
        """Seconds of latency per output token (Kwon et al., SOSP 2023, section 6.1)."""
        return self.latency / max(self.output_tokens, 1)

    def gaps(self) -> list[float]:
        """Seconds between one event with output and the next."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one quantity; all NaN without values."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        known = sorted(value for value in values if not math.isnan(value))
        if not known:
            return Spread(math.nan, math.nan, math.nan, math.nan)
        mean = math.fsum(known) / len(known)
        return Spread(mean, *(percentile(known, share) for share in (50, 90, 99)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` percent of `ordered` lies, interpolated between neighbours."""
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good; milliseconds, None for no bound."""

    ttft: float | None = None
    tpot: float | None = None

    def kept(self, record: Record) -> bool:
        if not record.ok:
            return False
        slow = self.ttft is not None and record.ttft * 1e3 > self.ttft
        # One token has no time per further token, so it cannot miss that bound.
        return not slow and not (self.tpot is not None and record.tpot * 1e3 > self.tpot)


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one label. Tokens are means of a request, durations milliseconds."""

    completed: int
    prompt_tokens: float
    cached_tokens: float
    ttft: Spread

    @staticmethod
    def of(records: Sequence[Record]) -> Group:
        return Group(
            len(records),
            Spread.of(record.prompt_tokens for record in records).mean,
            Spread.of(record.cached_tokens for record in records).mean,
            Spread.of(record.ttft * 1e3 for record in records),
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run. Durations are milliseconds, rates per second.

    Attributes:
        seconds: from the first request sent to the last response ended.
        short: requests that ended well with fewer tokens than asked for.
        errors: failed requests by kind; `examples`: a message of each kind.
        groups: completed requests by label, where they have one.
    """

    requests: int
    completed: int
    short: int
    errors: dict[str, int]
    examples: dict[str, str]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    normalised: Spread
    latency: Spread
    groups: dict[str, Group]


def _by_turn(labelled: tuple[str, list[Record]]) -> tuple[int, str]:
    """Puts "turn 10" after "turn 9"."""
    return len(labelled[0]), labelled[0]


def summarise(records: Sequence[Record], slo: Slo | None = None) -> Summary:
    """The figures of a run; failed requests count in `errors` and `seconds` only."""
    good = [record for record in records if record.ok]
    began = min((record.sent for record in records), default=0.0)
    seconds = max((record.ended for record in records), default=0.0) - began
    per = 1 / seconds if seconds > 0 else math.nan
    prompt = sum(record.prompt_tokens for record in good)
    output = sum(record.output_tokens for record in good)
    kept = sum(map((slo or Slo()).kept, good))
    failed = [record for record in records if not record.ok]
    labelled: dict[str, list[Record]] = {}
    for record in good:
        labelled.setdefault(record.label, []).append(record)
    return Summary(
        requests=len(records),
        completed=len(good),
        short=sum(record.output_tokens < record.wanted for record in good),
        errors=dict(Counter(record.error for record in failed)),
        examples={record.error: record.message for record in reversed(failed)},
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(record.cached_tokens for record in good),
        output_tokens=output,
        requests_per_s=len(good) * per,
        output_tokens_per_s=output * per,
        total_tokens_per_s=(prompt + output) * per,
        goodput_per_s=kept * per,
        ttft=Spread.of(record.ttft * 1e3 for record in good),
        tpot=Spread.of(record.tpot * 1e3 for record in good),
        itl=Spread.of(gap * 1e3 for record in good for gap in record.gaps()),
        normalised=Spread.of(record.normalised * 1e3 for record in good),
        latency=Spread.of(record.latency * 1e3 for record in good),
        groups={
            label: Group.of(own) for label, own in sorted(labelled.items(), key=_by_turn) if label
        },
    )
