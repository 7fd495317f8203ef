from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from executor.load import load_model
from tests.tiny import CHAT_TEMPLATE, END, byte_tokenizer, write_tiny_model


def test_a_tiny_model_loads_with_a_tokenizer_that_has_one_token_per_byte(tmp_path: Path) -> None:
    loaded = load_model(
        str(write_tiny_model(tmp_path / "tiny")),
        dtype="float32",
        device="cpu",
        on_progress=lambda what, share: None,
    )
    tokenizer = Tokenizer.from_buffer(loaded.card.tokenizer)
    text = "Grüße, 世界 \n\t ok"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("<|im_end|>").ids == [END]
    assert loaded.card.eos_ids == (END,)
    assert loaded.card.chat_template == CHAT_TEMPLATE
    assert not loaded.card.add_bos


def test_every_byte_round_trips() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.get_vocab_size() == 260
    every = bytes(range(1, 128)).decode()
    assert tokenizer.decode(tokenizer.encode(every).ids, skip_special_tokens=False) == every
