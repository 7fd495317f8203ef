"""Settings of the executor."""

from __future__ import annotations

import pytest

from executor.config import read


def test_flags_beat_the_environment_which_beats_defaults() -> None:
    config = read(["--block-size", "32"], {"EXECUTOR_BLOCK_SIZE": "8", "EXECUTOR_INDEX": "3"})
    assert (config.block_size, config.index, config.max_sequences) == (32, 3, 256)
    assert config.socket.name == "executor-3.sock"


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [([], 256), (["--device", "cuda"], 512), (["--max-step-tokens", "64"], 64)],
)
def test_a_step_is_as_large_as_suits_the_device(arguments: list[str], tokens: int) -> None:
    assert read(arguments, {}).step_tokens == tokens


@pytest.mark.parametrize(
    ("model", "index", "pool"),
    [
        ("smollm2", "0", "smollm2-0"),
        ("/models/My Model (v2)/", "1", "My-Model-v2-1"),
        ("/models/llama-3.Q4_0.gguf", "0", "llama-3.Q4_0-0"),
        ("...", "0", "model-0"),
    ],
)
def test_the_pool_is_named_after_the_model_and_the_index(model: str, index: str, pool: str) -> None:
    assert read(["--model", model, "--index", index], {}).pool == pool


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-memory", "lots"], "--kv-memory lots: must be a size"),
        (["--dtype", "float16"], "--dtype float16: must be one of float32, bfloat16"),
        (["--max-step-tokens", "8"], "--max-step-tokens 8: must be at least 16"),
        (["--pool-name", "a/b"], "--pool-name a/b: must be 1 to 64 letters"),
        (["--num-blocks", "0"], "--num-blocks 0: must be at least 1"),
    ],
)
def test_a_bad_value_ends_with_one_line_that_names_it(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(arguments, {})
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
