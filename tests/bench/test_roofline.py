"""The floor a served step is held against, and the step's time as clients see it."""

from __future__ import annotations

import pytest

from bench.load.client import ServerProblem
from bench.load.records import Record
from bench.roofline import Level, Peak, Work, impossible, main, shape, step_time, table
from kernels.cpu.build import Unavailable


def _record(first: float, step: float, tokens: int) -> Record:
    return Record(
        sent=0.0,
        wanted=tokens,
        arrivals=[first + step * i for i in range(tokens)],
        prompt_tokens=100,
        output_tokens=tokens,
    )


def test_the_default_model_has_the_work_its_card_says() -> None:
    work = Work.of(shape("smollm2"))
    assert work.weights * 2 == pytest.approx(269e6, rel=0.01)  # bytes as bfloat16
    assert work.kv * 2 * 320 == pytest.approx(7.4e6, rel=0.01)  # bytes of 320 positions


def test_few_streams_are_bound_by_reading_weights_and_many_by_products() -> None:
    work = Work(weights=1000, kv=10)
    assert work.least(1, 50, bandwidth=1000.0, peak=10_000.0) == pytest.approx(2.0 + 1.0)
    assert work.least(20, 50, bandwidth=1000.0, peak=10_000.0) == pytest.approx(4.0 + 20.0)


def test_a_step_is_timed_only_while_all_streams_decode() -> None:
    # The second stream starts at 1.0, when the first has 11 tokens of a slower time behind it.
    first = _record(0.0, 0.1, 11)
    first.arrivals += [1.0 + 0.2 * i for i in range(1, 40)]
    took, context = step_time([first, _record(1.0, 0.2, 21)])
    assert took == pytest.approx(0.2)
    assert context == pytest.approx((111 + 101) / 2 + 10)


def test_streams_that_hardly_meet_are_not_timed() -> None:
    with pytest.raises(ServerProblem, match="raise --output"):
        step_time([_record(0.0, 0.1, 10), _record(0.8, 0.1, 10)])


def test_a_server_faster_than_its_weights_can_be_read_is_not_believed() -> None:
    believed = Level(1, least=[0.007, 0.008], served=[0.008, 0.009])
    quantised = Level(1, least=[0.008, 0.008], served=[0.004, 0.004])
    assert not impossible([believed])
    assert impossible([believed, quantised])
    assert "200%" in table([quantised])


def test_a_failed_request_ends_the_measurement() -> None:
    bad = _record(0.0, 0.1, 10)
    bad.error = "http 503"
    with pytest.raises(ServerProblem, match="http 503"):
        step_time([bad])


def test_the_peak_rate_is_that_of_a_machine() -> None:
    try:
        peak = Peak()
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert 1e8 < peak.rate(1) < 1e13


def test_a_machine_without_a_compiler_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "nonesuch")
    monkeypatch.setattr("sys.argv", ["roofline"])
    assert main() == 1
    assert capsys.readouterr().err.startswith("bench.roofline: CXX names nonesuch")


def test_a_model_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.roofline.Peak", object)
    monkeypatch.setattr("sys.argv", ["roofline", "--model", "nonesuch"])
    assert main() == 1
    assert "no model at 'nonesuch'" in capsys.readouterr().err
