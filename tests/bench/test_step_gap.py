"""The gap between native steps is measured with everything real; here that it ends and counts every load."""

from __future__ import annotations

import pytest
import torch

from bench.step_gap import main
from executor.load import DEFAULT_MODEL, find, load_model
from executor.native import why_not
from executor.weights import BadModel


def test_every_load_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        find(DEFAULT_MODEL)
    except BadModel as error:
        pytest.skip(str(error))
    loaded = load_model(
        DEFAULT_MODEL, dtype="bfloat16", device="cpu", on_progress=lambda what, share: None
    )
    if reason := why_not(loaded, torch.bfloat16):
        pytest.skip(reason)
    main(["--streams", "1,3", "--temperatures", "0,1", "--steps", "12"], loaded)
    loads = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert loads == [["1", "0"], ["3", "0"], ["1", "1"], ["3", "1"]]
