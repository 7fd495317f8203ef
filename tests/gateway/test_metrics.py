from __future__ import annotations

import timeit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics
from tests.gateway.front import status


def scraped(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels other than the model's; fails if a label is missing."""
    samples = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if not sample.name.startswith("process_"):
                assert labels.pop("model_name") == "org/model"
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return samples


def busy() -> Metrics:
    metrics = Metrics()
    metrics.on_request("org/model")
    metrics.on_first_token(0.3)
    for _ in range(3):
        metrics.on_token_gap(0.02)
    metrics.on_finish("stop", 100, 5, 1.3, 0.1, 0.3)
    metrics.on_finish("length", 10, 7, 2.0, None)
    metrics.on_error("overloaded")
    metrics.on_executor_status(
        0,
        status(
            running=3, waiting=2, waiting_tokens=50, blocks_total=100, blocks_used=25, steps=9,
            preemptions=4, prompt_tokens=110, generated_tokens=12, hit_tokens=64, query_tokens=110,
            memory_wait_us=2_500_000,
        ),
    )  # fmt: skip
    return metrics


# What dashboards made for vLLM ask for.
NAMES = {
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 2,
    "vllm:kv_cache_usage_perc": 0.25,
    "vllm:prompt_tokens_total": 110,
    "vllm:generation_tokens_total": 12,
    "vllm:prefix_cache_queries_total": 110,
    "vllm:prefix_cache_hits_total": 64,
    "vllm:num_preemptions_total": 4,
    "vllm:time_to_first_token_seconds_count": 1,
    "vllm:inter_token_latency_seconds_count": 3,
    "vllm:inter_token_latency_seconds_sum": 0.06,
    "vllm:time_per_output_token_seconds_sum": 0.25,
    "vllm:e2e_request_latency_seconds_sum": 3.3,
    "vllm:request_queue_time_seconds_sum": 0.1,
    "vllm:request_prefill_time_seconds_sum": 0.2,
    "vllm:request_decode_time_seconds_sum": 1.0,
    "vllm:request_inference_time_seconds_sum": 1.2,
    "vllm:request_prompt_tokens_sum": 110,
    "vllm:request_generation_tokens_sum": 12,
    "pagekeeper:memory_wait_seconds_total": 2.5,
    "pagekeeper:executors_ready": 1,
    "pagekeeper:requests_total": 1,
}


@pytest.mark.parametrize("name", NAMES)
def test_dashboards_for_vllm_find_the_names_they_ask_for(name: str) -> None:
    assert scraped(busy())[name, ()] == pytest.approx(NAMES[name])


def test_ends_and_errors_are_counted_by_reason() -> None:
    samples = scraped(busy())
    success = "vllm:request_success_total"
    assert samples[success, (("finished_reason", "stop"),)] == 1
    assert samples[success, (("finished_reason", "length"),)] == 1
    assert samples["pagekeeper:errors_total", (("code", "overloaded"),)] == 1


def test_histogram_buckets_are_cumulative_and_a_bound_belongs_to_its_bucket() -> None:
    metrics = Metrics("org/model")
    for seconds in (0.25, 0.2500001, 1e9):
        metrics.on_first_token(seconds)
    samples = scraped(metrics)
    name = "vllm:time_to_first_token_seconds_bucket"
    assert samples[name, (("le", "0.1"),)] == 0
    assert samples[name, (("le", "0.25"),)] == 1
    assert samples[name, (("le", "0.5"),)] == 2
    assert samples[name, (("le", "640.0"),)] == 2
    assert samples[name, (("le", "+Inf"),)] == 3


def test_executors_are_added_up_and_a_lost_one_runs_nothing_but_keeps_its_counters() -> None:
    metrics = Metrics("org/model")
    one = status(running=2, blocks_total=100, blocks_used=50, generated_tokens=7)
    metrics.on_executor_status(0, one)
    metrics.on_executor_status(1, one)
    assert scraped(metrics)["vllm:num_requests_running", ()] == 4
    metrics.on_executor_gone(1)
    samples = scraped(metrics)
    assert samples["vllm:num_requests_running", ()] == 2
    assert samples["vllm:kv_cache_usage_perc", ()] == 0.5
    assert samples["vllm:generation_tokens_total", ()] == 14
    assert samples["pagekeeper:executors_ready", ()] == 1
    metrics.on_executor_status(1, one)
    assert scraped(metrics)["vllm:num_requests_running", ()] == 4


def test_before_anything_happened_there_are_zeros_and_no_created_series() -> None:
    text = Metrics("org/model").render().decode()
    assert 'vllm:kv_cache_usage_perc{model_name="org/model"} 0.0' in text
    assert "_created" not in text


def test_a_scrape_is_cheap_enough_for_three_a_second() -> None:
    metrics = busy()
    assert min(timeit.repeat(metrics.render, number=1, repeat=20)) < 0.02
