"""The tokenizer that needs no file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph import ModelError
from bullet_graph.models.presets import PRESETS, PRESETS_OF_BYTES
from bullet_graph.models.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer(512)


def test_it_fits_its_presets() -> None:
    for name in PRESETS_OF_BYTES:
        assert byte_tokenizer(PRESETS[name].vocab_size).vocab_size == PRESETS[name].vocab_size


def test_every_token_has_a_text() -> None:
    texts = [TOKENIZER.decode([i], skip_special_tokens=False) for i in range(512)]
    assert all(texts)
    assert len(TOKENIZER.encode("eatonahi")) < 8  # pairs of letters are one token


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_texts_come_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


def test_long_texts_are_the_same_tokens() -> None:
    """They take another way through the library, one that lets other threads run."""
    assert TOKENIZER.encode("hello " * 2000) == TOKENIZER.encode("hello ") * 2000


def test_a_conversation_has_a_token_at_each_end_of_a_turn() -> None:
    text = TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert (ids[0], ids.count(256), ids.count(257)) == (256, 2, 1)
    assert TOKENIZER.decode(ids) == "user\nhi\nassistant\n"


@pytest.mark.parametrize("vocab_size", [0, 257, 515])
def test_other_sizes_are_refused(vocab_size: int) -> None:
    with pytest.raises(ModelError, match=f"from 258 to 514 entries, but {vocab_size} were asked for"):
        byte_tokenizer(vocab_size)
