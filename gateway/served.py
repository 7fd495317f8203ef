"""What an executor serves, made usable: its card, its tokenizer and its chat template."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from gateway.template import ChatTemplate
from gateway.vocabulary import Vocabulary
from wire.generate import ModelCard


@dataclass(slots=True, frozen=True)
class Model:
    """What an executor serves, made usable."""

    card: ModelCard
    vocabulary: Vocabulary
    template: ChatTemplate | None  # None: it has no chat template
    meaning: bytes  # equal for executors whose token ids and chats mean the same

    def room(self, prompt: int, choices: int) -> int:
        """Tokens each choice can generate before the context or the KV pool ends; 0 or less: none.

        The sum of `most_new_tokens` in `executor/accept.py`, by which requests are admitted: choices
        share the prompt's full blocks.
        """
        size = self.card.block_size
        shared = prompt // size
        each = (self.card.pool_tokens // size - shared) // choices + shared
        return min(self.card.context_length, each * size) - prompt


def build_model(card: ModelCard) -> Model:
    """Takes a while for a large tokenizer: not to be called on the loop.

    Raises:
        BadTokenizer, BadTemplate: the card cannot be used.
    """
    vocabulary = Vocabulary(card.tokenizer, card.bos_token, card.add_bos)
    named = {"bos_token": card.bos_token, "eos_token": card.eos_token, "pad_token": card.pad_token}
    special = {name: token for name, token in named.items() if token}  # else undefined, not ""
    template = ChatTemplate(card.chat_template, special) if card.chat_template else None
    meaning = hashlib.sha256(card.tokenizer + card.chat_template.encode()).digest()
    return Model(card, vocabulary, template, meaning)
