"""The tiny world's tokenizer: one token per word, 42 in all, saved and loaded like any other fast tokenizer."""

from __future__ import annotations

import re

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from agon_cli.tiny.world import EOS, PAD, VOCABULARY

CHAT_TEMPLATE = "{{ messages | map(attribute='content') | join(' ') }}"
"""The messages' own text and nothing else: the world has no turns, so there is no role marker to write."""
MAX_LENGTH = 256


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the places in VOCABULARY and whose decoded text has single spaces between words.

    The tags are ordinary words, so they survive `skip_special_tokens`; only padding and end of text are special.
    A word outside the vocabulary is dropped: the model has no embedding for it, and an unknown-word token that was
    never trained would only add noise to the prompt.
    """
    known = "|".join(re.escape(word) for word in VOCABULARY)
    core = Tokenizer(WordLevel({word: place for place, word in enumerate(VOCABULARY)}))
    core.pre_tokenizer = Sequence(
        [WhitespaceSplit(), Split(Regex(rf"\A(?:{known})\z"), behavior="removed", invert=True)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
        padding_side="left",
    )
