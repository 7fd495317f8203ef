"""Every Prometheus name of the gateway in one file: vLLM's, so that existing dashboards work.

Gauges and the executors' counters are read from the last `Status` when somebody scrapes, so they cannot
drift from the truth. What only the gateway sees (latencies as its clients feel them) is kept in plain
arrays: recording a value is a binary search and two additions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from wire.generate import Status

# Upper bounds of buckets, seconds.
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
_GAPS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 10, 40),
)
_LONG = (
    *(0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920),
)
_TOKENS = tuple(m * 10**e for e in range(7) for m in (1, 2, 5))


class _Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        total, out = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            out.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return out


class Metrics(Collector):
    """What has happened, for `/metrics`. All times are seconds of monotonic clocks of one process.

    Attributes:
        model: the value of the label `model_name`; set it when the model's name is known.
        on_token_gap: to be called with the time between two tokens of one choice.
    """

    def __init__(self, model: str = "") -> None:
        self.model = model
        self._statuses: dict[int, Status] = {}
        self._gone: set[int] = set()
        self._requests = 0
        self._finished: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._first_token = _Histogram(_FIRST)
        self._gap = _Histogram(_GAPS)
        self.on_token_gap = self._gap.observe  # for every token: no call more than needed
        self._per_token = _Histogram(_GAPS)
        self._e2e = _Histogram(_LONG)
        self._queue = _Histogram(_LONG)
        self._prefill = _Histogram(_LONG)
        self._decode = _Histogram(_LONG)
        self._inference = _Histogram(_LONG)
        self._prompt_tokens = _Histogram(_TOKENS)
        self._generated_tokens = _Histogram(_TOKENS)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    # ------------------------------------------------------------ events

    def on_request(self, model: str) -> None:
        """A request for `model` (one that is served) was let in."""
        self._requests += 1
        self.model = self.model or model

    def on_first_token(self, seconds: float) -> None:
        """The first token left, this long after the request arrived."""
        self._first_token.observe(seconds)

    def on_finish(
        self,
        reason: str,
        prompt_tokens: int,
        generated_tokens: int,
        e2e_seconds: float,
        queue_seconds: float | None,
        first_token_seconds: float | None = None,
    ) -> None:
        """A request ended: `reason` is a finish reason, or "abort"."""
        self._finished[reason] += 1
        self._prompt_tokens.observe(prompt_tokens)
        self._generated_tokens.observe(generated_tokens)
        self._e2e.observe(e2e_seconds)
        if queue_seconds is not None:
            self._queue.observe(queue_seconds)
            self._inference.observe(e2e_seconds - queue_seconds)
        if first_token_seconds is not None:
            self._prefill.observe(first_token_seconds - (queue_seconds or 0.0))
            self._decode.observe(e2e_seconds - first_token_seconds)
            if generated_tokens > 1:
                self._per_token.observe(
                    (e2e_seconds - first_token_seconds) / (generated_tokens - 1)
                )

    def on_error(self, code: str) -> None:
        """A client was answered with an error."""
        self._errors[code] += 1

    def on_executor_status(self, index: int, status: Status) -> None:
        """The load and counters of executor `index`, replacing its last ones."""
        self._statuses[index] = status
        self._gone.discard(index)

    def on_executor_gone(self, index: int) -> None:
        """Executor `index` is lost: it runs nothing; its counters stay until it is back."""
        self._gone.add(index)

    # ------------------------------------------------------------ scrape

    def render(self) -> bytes:
        """Prometheus' text format, UTF-8."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """No names are checked at registration; there is one collector of ours."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, from the state of this moment."""
        live = [status for index, status in self._statuses.items() if index not in self._gone]
        total = sum(status.blocks_total for status in live)
        yield self._gauge(
            "vllm:num_requests_running",
            "Sequences in the batch.",
            sum(status.running for status in live),
        )
        yield self._gauge(
            "vllm:num_requests_waiting",
            "Sequences waiting to be scheduled.",
            sum(status.waiting for status in live),
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of KV blocks in use, 0 to 1.",
            sum(status.blocks_used for status in live) / total if total else 0.0,
        )
        yield self._gauge(
            "pagekeeper:num_tokens_waiting",
            "Prompt tokens waiting to be scheduled.",
            sum(status.waiting_tokens for status in live),
        )
        yield self._gauge(
            "pagekeeper:executors_ready",
            "Executors that take requests.",
            sum(status.ready and not status.draining for status in live),
        )
        yield from self._executor_counters()
        yield self._counter("pagekeeper:requests", "Requests let in.", {(): self._requests})
        yield self._counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            {(reason,): count for reason, count in self._finished.items()},
            ("finished_reason",),
        )
        yield self._counter(
            "pagekeeper:errors",
            "Requests answered with an error, by code.",
            {(code,): count for code, count in self._errors.items()},
            ("code",),
        )
        for name, help_, histogram in self._histograms():
            family = HistogramMetricFamily(name, help_, labels=("model_name",))
            family.add_metric((self.model,), histogram.buckets(), histogram.sum)
            yield family

    def _executor_counters(self) -> Iterator[Metric]:
        all_ = self._statuses.values()
        for name, help_, value in (
            (
                "vllm:prompt_tokens",
                "Prompt tokens computed or hit.",
                [s.prompt_tokens for s in all_],
            ),
            ("vllm:generation_tokens", "Tokens generated.", [s.generated_tokens for s in all_]),
            ("vllm:prefix_cache_queries", "Tokens looked up.", [s.query_tokens for s in all_]),
            ("vllm:prefix_cache_hits", "Tokens found cached.", [s.hit_tokens for s in all_]),
            ("vllm:num_preemptions", "Sequences put back.", [s.preemptions for s in all_]),
            ("pagekeeper:engine_steps", "Engine steps.", [s.steps for s in all_]),
            (
                "pagekeeper:memory_wait_seconds",
                "Time step loops stood waiting for memd.",
                [s.memory_wait_us / 1e6 for s in all_],
            ),
        ):
            yield self._counter(name, help_, {(): sum(value)})

    def _histograms(self) -> Iterator[tuple[str, str, _Histogram]]:
        yield "vllm:time_to_first_token_seconds", "Arrival to first token.", self._first_token
        yield "vllm:inter_token_latency_seconds", "Between two tokens of a choice.", self._gap
        yield (
            "vllm:time_per_output_token_seconds",
            "Mean time per token after the first, per request.",
            self._per_token,
        )
        yield "vllm:e2e_request_latency_seconds", "Arrival to last token.", self._e2e
        yield "vllm:request_queue_time_seconds", "Arrival to first schedule.", self._queue
        yield "vllm:request_prefill_time_seconds", "Schedule to first token.", self._prefill
        yield "vllm:request_decode_time_seconds", "First to last token.", self._decode
        yield "vllm:request_inference_time_seconds", "Schedule to last token.", self._inference
        yield "vllm:request_prompt_tokens", "Prompt tokens per request.", self._prompt_tokens
        yield (
            "vllm:request_generation_tokens",
            "Tokens generated per request.",
            self._generated_tokens,
        )

    def _gauge(self, name: str, help_: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_, labels=("model_name",))
        family.add_metric((self.model,), value)
        return family

    def _counter(
        self,
        name: str,
        help_: str,
        values: dict[tuple[str, ...], Any],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        family = CounterMetricFamily(name, help_, labels=("model_name", *labels))
        for key, value in values.items():
            family.add_metric((self.model, *key), value)
        return family


METRICS = web.AppKey("metrics", Metrics)
