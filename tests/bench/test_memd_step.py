from __future__ import annotations

from bench.memd_step import STEPS, Driver, local, run


def test_it_times_a_real_memd_and_the_core_alone_for_every_size() -> None:
    rows = run(sequences=[1, 16], pools=[300, 600], rounds=1)
    assert [(row["sequences"], row["blocks"]) for row in rows] == [
        (1, 300), (1, 600), (16, 300), (16, 600),
    ]  # fmt: skip
    for row in rows:
        assert row["samples"] == STEPS
        assert 0 < float(str(row["core_p50_us"])) < float(str(row["p50_us"]))


def test_its_load_is_what_it_says_staggered_and_evicting() -> None:
    driver = Driver(local(2000), 2000)
    driver.register()
    driver.fill()
    driver.begin(256)
    for _ in range(STEPS):
        step = driver.decode()
        assert len(step.appends) == 16  # one sequence in sixteen begins a block
        granted = driver.send(step)
        assert granted.usage.free == 0  # so every one of those blocks had to be evicted
        assert len(granted.changes) == 16
    assert granted.usage.used == sum(-(-length // 16) for length in driver.lengths.values())
