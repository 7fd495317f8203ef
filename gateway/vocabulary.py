"""Text to token ids and single tokens to bytes, for one model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gateway.detokenize import Detokenizer

OFF_LOOP_CHARS = 4096  # about a millisecond of encoding; longer texts would delay everyone's tokens
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class BadTokenizer(ValueError):
    """The tokenizer an executor sent cannot be used, and why."""


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level BPE (GPT-2) writes bytes as, and their bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(0x100) if byte not in set(plain))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _decoder_kinds(spec: Any) -> set[str]:
    """Names of all decoders in tokenizer.json's `decoder`."""
    if not isinstance(spec, dict):
        return set()
    inner = spec.get("decoders", ())
    return {str(spec.get("type"))}.union(*map(_decoder_kinds, inner))


class _Texts(dict[int, str]):
    """Texts of tokens, computed when first asked for. At most one for each token of the vocabulary."""

    def __init__(self, text: Callable[[int], str | None]) -> None:
        super().__init__()
        self._text = text

    def __missing__(self, token: int) -> str:
        if (text := self._text(token)) is None:
            return ""  # unknown ids are not kept: there are too many
        self[token] = text
        return text


class Vocabulary:
    """A tokenizer and what the gateway asks of it.

    Args:
        tokenizer: the bytes of a tokenizer.json.
        bos_token: put in front of plain prompts when `add_bos`.

    Raises:
        BadTokenizer: the bytes are no tokenizer, or bos_token is not in it.
    """

    def __init__(self, tokenizer: bytes, bos_token: str = "", add_bos: bool = False) -> None:
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer)
            spec = msgspec.json.decode(tokenizer)
        except Exception as error:  # the library raises the bare class
            raise BadTokenizer(f"its tokenizer cannot be read: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._bos: list[int] = []
        if add_bos:
            bos = self.tokenizer.token_to_id(bos_token)
            if bos is None:
                raise BadTokenizer(f"its tokenizer has no token {bos_token!r}")
            self._bos = [bos]
        self._added: dict[int, str] = {
            id: token.content for id, token in self.tokenizer.get_added_tokens_decoder().items()
        }
        kinds = _decoder_kinds(spec["decoder"])
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else {}
        self._whole = _Texts(self._whole_text) if kinds == {"ByteLevel"} else None
        # One thread: encoding is bounded to one core, and the loop keeps the other.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Special tokens spelled out in it are recognised."""
        if len(text) <= OFF_LOOP_CHARS:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        else:
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._thread, self._encode_long, text)
        return self._bos + ids if add_special_tokens else ids

    def _encode_long(self, text: str) -> list[int]:
        # The batch call gives up the interpreter lock while it works; the plain one does not.
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """For one choice that continues `prompt`."""
        return Detokenizer(self.tokenizer, prompt, self._whole)

    def _whole_text(self, token: int) -> str | None:
        """See `Detokenizer`; None for an id that is not in the tokenizer."""
        if token in self._added:
            return ""
        piece: str | None = self.tokenizer.id_to_token(token)
        if piece is None:
            return None
        try:
            text = bytes(map(self._alphabet.__getitem__, piece)).decode()
        except (KeyError, UnicodeDecodeError):
            return ""
        # The window takes U+FFFD for an unfinished character.
        return "" if "\ufffd" in text else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for; empty for an id that is not in the tokenizer."""
        if (added := self._added.get(token)) is not None:
            return added.encode()
        piece: str | None = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._alphabet:
            # A character outside the alphabet can only come from an odd vocabulary: show it as it is.
            return b"".join(
                bytes([self._alphabet[char]]) if char in self._alphabet else char.encode()
                for char in piece
            )
        if fallback := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(fallback[1])
        return piece.replace("▁", " ").encode()
