"""Token ids to text, as they come: no broken characters, and the pieces joined are the whole text.

A character may be spread over several tokens, and a decoder may treat the first token specially
(SentencePiece drops its leading space), so a token's text depends on its neighbours. `DecodeStream` decodes
a short window and waits while the text ends in U+FFFD. Around it: the prompt's last tokens as context, so
that the output reads on from the prompt; a flush at the end; and a bound on how long undecodable bytes
are waited for.

Where a decoder does no more than join the bytes of tokens (byte-level BPE: most models), a token that is
whole characters, after whole characters, has a text of its own, which is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CONTEXT_TOKENS = 6  # of the prompt: enough that none of them is "the first token" of the window
LONGEST_WAIT = 24  # tokens without text before undecodable bytes are given up on
_CHARACTER_TOKENS = 4  # a character has at most 4 bytes, a token at least one
_BROKEN = "\ufffd"


class Detokenizer:
    """Decodes the tokens of one choice.

    Special tokens are skipped, as clients expect. Ids the tokenizer does not know have no text.

    Args:
        tokenizer: shared and not changed.
        prompt: token ids the output continues; only the last few are read.
        whole: texts of tokens that are the same after every whole character; "" for all others. None: no
            token is known to have such a text.
    """

    __slots__ = ("_behind", "_context", "_pending", "_stream", "_tokenizer", "_whole")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        whole: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._whole = whole
        self._behind = False  # tokens were looked up since the window was last used
        self._pending: list[int] = []  # fed since the last text
        self._context: list[int]
        self._stream: DecodeStream
        self._restart(self._tail(prompt))

    def feed(self, tokens: Sequence[int]) -> str:
        """The text these tokens complete; empty while a character is unfinished."""
        return "".join(self.feed_one(token) for token in tokens)

    def feed_one(self, token: int) -> str:
        if self._whole is not None and not self._pending:
            if text_of_its_own := self._whole[token]:
                self._behind = True
                return text_of_its_own
            if self._behind:
                self._restart([])  # such a decoder needs no context
        self._pending.append(token)
        try:
            text: str | None = self._stream.step(self._tokenizer, token)
        except Exception as error:  # the library raises the bare class
            if "Invalid prefix" not in str(error):
                raise
            return self._resume()
        if text is not None:
            self._context, self._pending = self._pending, []
            return text
        return self._give_up() if len(self._pending) >= LONGEST_WAIT else ""

    def flush(self) -> str:
        """The text of an unfinished tail, broken characters as U+FFFD. Nothing may be fed after it."""
        if not self._pending:
            return ""
        text = self._text_after(self._context, self._pending)
        self._restart([])
        return text

    def _tail(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last tokens, from the beginning of a character on, to the end of one."""
        for length in range(CONTEXT_TOKENS, CONTEXT_TOKENS + _CHARACTER_TOKENS):
            context = list(prompt[-length:])
            if not self._decode(context).endswith(_BROKEN):
                return context
        # It ends inside a character, or in a U+FFFD of its own: the two look the same.
        while context and self._decode(context).endswith(_BROKEN):
            context.pop()
        return context

    def _restart(self, context: list[int]) -> None:
        self._context = context  # what the window holds before the pending ones
        self._pending = []
        self._behind = False
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)

    def _resume(self) -> str:
        """New bytes changed how earlier ones decode, which were shown already: decode from here on."""
        pending = self._pending
        text = self._decode(pending)
        self._restart(pending)
        return text

    def _give_up(self) -> str:
        """Show what no later token can repair, so that the window stays short."""
        pending = self._pending
        whole = self._text_after(self._context, pending)
        if not whole:  # special tokens, or ids the tokenizer does not know
            self._restart(self._context)
            return ""
        for cut in range(
            len(pending) - _CHARACTER_TOKENS, len(pending) - 2 * _CHARACTER_TOKENS, -1
        ):
            head = self._text_after(self._context, pending[:cut])
            rest = self._decode(pending[cut:])
            if head + rest == whole:
                self._restart([])
                return head + self.feed(pending[cut:])
        self._restart([])
        return whole

    def _text_after(self, context: list[int], tokens: list[int]) -> str:
        """Text of `tokens` read after `context`."""
        return self._decode(context + tokens)[len(self._decode(context)) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
