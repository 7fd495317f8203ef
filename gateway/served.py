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
