"""A tokenizer that needs no file: bytes and pairs of letters, with a chat template, for models of random weights."""

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from bullet_graph.errors import ModelError
from bullet_graph.models.tokenizer import Tokenizer

_TURN_BEGINS, _TURN_ENDS = "<|im_start|>", "<|im_end|>"
_LETTERS = "etaoinshrdlucmfw"
"""Their pairs fill what a vocabulary has left, so that every token a model of random weights samples is a text."""

_CHAT_TEMPLATE = """{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Every byte is a token; two more begin and end a turn of a conversation, and the others are pairs of letters.

    Args:
        vocab_size: entries; at most 514.

    Raises:
        ModelError: it has no room for the bytes, or for more than bytes and pairs.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_pairs = vocab_size - len(alphabet) - 2
    pairs = [(a, b) for a in _LETTERS for b in _LETTERS][: max(num_pairs, 0)]
    if num_pairs != len(pairs):
        raise ModelError(
            f"a tokenizer of bytes has from {len(alphabet) + 2} to {len(alphabet) + 2 + len(_LETTERS) ** 2} entries, "
            f"but {vocab_size} were asked for: give the model a folder with a tokenizer.json"
        )
    texts = [*alphabet, _TURN_BEGINS, _TURN_ENDS, *("".join(pair) for pair in pairs)]
    tokenizer = tokenizers.Tokenizer(BPE({text: i for i, text in enumerate(texts)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_TURN_BEGINS, _TURN_ENDS])
    return Tokenizer(tokenizer, chat_template=_CHAT_TEMPLATE, special_tokens={"eos_token": _TURN_ENDS})
