import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoints import BOS_TOKEN, BOS_TOKEN_ID, EOS_TOKEN_ID, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from bullet_graph.errors import ModelError, PromptError
from bullet_graph.models.presets import PRESETS, PRESETS_OF_BYTES
from bullet_graph.models.tokenizer import Tokenizer, byte_tokenizer

MESSAGES = [
    {"role": "system", "content": "  Be <brief> & kind. "},
    {"role": "user", "content": "你好 🙂"},
    {"role": "assistant", "content": "Hello!"},
]

MULTI_BYTE = "naïve 🙂👩‍👩‍👧 你好,世界 \u0928\u092e\u0938\u094d\u0924\u0947 end"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return read(folder)


def read(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join([*(stream.push(token_id) for token_id in ids), stream.flush()])


def write_config(folder: Path, **config: Any) -> Path:
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_encode_and_decode_equal_those_of_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    for special in (True, False):
        ids = tokenizer.encode(MULTI_BYTE, add_special_tokens=special)
        assert ids == reference.encode(MULTI_BYTE, add_special_tokens=special)
        assert (ids[0] == BOS_TOKEN_ID) == special
        assert tokenizer.decode(ids) == MULTI_BYTE
    assert tokenizer.decode(tokenizer.encode("one"), skip_special_tokens=False) == f"{BOS_TOKEN}one"


def test_ids_outside_the_vocabulary_add_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a 🙂 b", add_special_tokens=False)
    padded = [token_id for pair in zip(ids, range(300, 400), strict=False) for token_id in pair]
    assert tokenizer.decode(padded) == "a 🙂 b"
    assert streamed(tokenizer, padded) == "a 🙂 b"


NOT_USABLE = r"tokenizer\.json is not a usable tokenizer"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        *(("tokenizer.json", content, NOT_USABLE) for content in (b"", b"{", b"{}", b"[]", b"\xff")),
        ("tokenizer.json", b'{"model": {"type": "None"}}', NOT_USABLE),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json must hold a JSON object"),
        *(
            ("tokenizer_config.json", b'{"chat_template": %s}' % value, r"json: chat_template must be")
            for value in (
                *(b"5", b"[]", b'["default"]', b'[{"name": "tool_use", "template": "tool"}]'),
                b'[{"name": "default", "template": 3}]',
            )
        ),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja cannot be read as UTF-8"),
        ("special_tokens_map.json", b'{"pad_token": []}', r"special_tokens_map\.json: pad_token must be"),
        ("tokenizer_config.json", b'{"bos_token": 7}', r"tokenizer_config\.json: bos_token must be"),
        ("tokenizer_config.json", b'{"pad_token": "a\\ud800"}', r"tokenizer_config\.json: pad_token must be"),
        ("tokenizer_config.json", b'{"eos_token": {"content": 7}}', r"tokenizer_config\.json: eos_token must be"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": 7}}', r"json: added_tokens_decoder must be"),
    ],
)
def test_broken_file(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=problem):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_a_file_of_another_kind_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ModelError, match=rf"holds {name} without tokenizer\.json.* AutoTokenizer.* or remove {name}"):
        Tokenizer.from_folder(tmp_path)


def test_truncation_and_padding_of_training_are_switched_off(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    trained = tokenizers.Tokenizer.from_file(path)
    trained.enable_truncation(4)
    trained.enable_padding(length=64)
    trained.save(path)
    text = "the quick brown fox"
    assert read(tmp_path).decode(read(tmp_path).encode(text)) == text
    assert len(read(tmp_path).encode(text)) < 64


@pytest.mark.parametrize(("text", "found"), [("a\ud83d", "surrogate"), (7, "int"), (None, "NoneType")])
def test_text_that_cannot_be_encoded(tokenizer: Tokenizer, text: Any, found: str) -> None:
    with pytest.raises(PromptError, match=found):
        tokenizer.encode(text)


def test_stream_holds_back_incomplete_characters(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    ids = [*tokenizer.encode("h🙂é!"), EOS_TOKEN_ID]
    assert [stream.push(token_id) for token_id in ids] == ["", "h", "", "", "", "🙂", "", "é", "!", ""]
    assert stream.flush() == ""
    # The end of the text gives what never became a character.
    assert [stream.push(token_id) for token_id in tokenizer.encode("a🙂")[:-2]] == ["", "a", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@given(text=st.text())
def test_streamed_text_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids) == text
    one, other = tokenizer.stream(), tokenizer.stream()
    pieces = [(one.push(token_id), other.push(token_id)) for token_id in ids]
    assert all(ours == theirs for ours, theirs in pieces), "streams are independent"


@given(ids=st.lists(st.integers(0, 330)), times=st.sampled_from([1, 80]))
def test_stream_equals_decode_for_any_ids(tokenizer: Tokenizer, ids: list[int], times: int) -> None:
    assert streamed(tokenizer, ids * times) == tokenizer.decode(ids * times)


def test_stream_cost_does_not_grow_where_there_is_no_text(tokenizer: Tokenizer) -> None:
    stream, start = tokenizer.stream(), time.perf_counter()
    assert not any(stream.push(token_id) for token_id in (EOS_TOKEN_ID, 310) * 20_000)
    assert stream.push(tokenizer.encode("x")[-1]) == "x"
    assert set("".join(map(stream.push, tokenizer.encode("🙂")[1:2] * 20_000))) == {"\ufffd"}
    assert time.perf_counter() - start < 2


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2's: pieces that begin words, and bytes where there is no piece."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hi", "yo"]
    raw = tokenizers.Tokenizer(BPE({one: i for i, one in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return Tokenizer(raw)


# Ids of two pieces; a byte's id is one above its value.
HI, YO = 258, 259


def test_byte_fallback_stream() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = [HI, *(byte + 1 for byte in "🙂\n你".encode()), HI, YO]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids) == "hi🙂\n你 hiyo"
    # Text that decode would take back is kept.
    ids = [HI, *(byte + 1 for byte in b"\n\xe4"), YO, HI]
    assert tokenizer.decode(ids) == "hi\ufffd\ufffdyo hi"
    stream = tokenizer.stream()
    assert [stream.push(token_id) for token_id in ids] == ["hi", "\n", "", "\ufffdyo", " hi"]
    assert stream.flush() == ""


@given(ids=st.lists(st.one_of(st.integers(0, 265), st.sampled_from([0x0B, 0xE5, 0xBE, 0xA1, HI, YO]))))
def test_byte_fallback_stream_takes_any_ids(ids: list[int]) -> None:
    tokenizer = byte_fallback_tokenizer()
    decoded = tokenizer.decode(ids)
    # Only where bytes are invalid may the two differ.
    assert streamed(tokenizer, ids) == decoded or "\ufffd" in decoded


def test_chat_template_equals_that_of_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    for prompt in (True, False):
        text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=prompt)
        assert text == reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
        ids = reference.apply_chat_template(MESSAGES, add_generation_prompt=prompt, return_dict=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.apply_chat_template(MESSAGES).endswith("[assistant] ")


# Options of the environment, tojson without HTML escapes, None for tools, loop controls, namespaces, the date.
PUBLISHED_IDIOMS = """
{%- if tools is not none %}tools{% endif %}
{%- if documents is not none %}documents{% endif %}
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message['role'] == 'assistant' %}
        {% break %}
    {% endif %}
    {%- set ns.count = ns.count + 1 -%}
    {{ message | tojson }}|{{ message | tojson(indent=2) }}
{% endfor %}
{% generation %}{% if enable_thinking %}<think>{{ ns.count }}</think>{% endif %}{% endgeneration %}
{{ strftime_now('%Y') }} {{ ns.count }}{{ eos_token }}{{ undefined_name }}"""


def test_idioms_of_published_templates(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token="</s>", chat_template=PUBLISHED_IDIOMS)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for think in (False, True):
        text = read(tmp_path).apply_chat_template(MESSAGES, template_kwargs={"enable_thinking": think})
        assert text == reference.apply_chat_template(MESSAGES, tokenize=False, enable_thinking=think)
        assert ("<think>2</think>" in text) == think
    assert "<brief> &" in text
    assert text.endswith("2</s>")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "time limit", "a-b", ""])
def test_variables_that_a_request_cannot_give(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(PromptError, match=f"^`chat_template_kwargs` must name .* found {name!r}"):
        tokenizer.apply_chat_template(MESSAGES, template_kwargs={name: 1})


def test_template_file_comes_before_tokenizer_config(tmp_path: Path, folder: Path) -> None:
    PreTrainedTokenizerFast.from_pretrained(folder).save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").exists()
    assert read(tmp_path).apply_chat_template(MESSAGES) == read(folder).apply_chat_template(MESSAGES)
    write_config(tmp_path, chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read(tmp_path).apply_chat_template(MESSAGES) == "file"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "{{ bos_token }}plain"}]
    write_config(tmp_path, chat_template=named, bos_token={"content": "<s>", "special": True})
    for tools, text in ((None, "<s>plain"), ([], "<s>plain"), ([{"type": "function"}], "tool")):
        assert read(tmp_path).apply_chat_template(MESSAGES, tools=tools) == text
    own = read(tmp_path).apply_chat_template(MESSAGES, template_kwargs={"bos_token": "<own>"})
    assert own == "<own>plain"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file")
    assert read(tmp_path).apply_chat_template(MESSAGES, tools=[{}]) == "file"


def test_special_tokens_of_older_folders(tmp_path: Path) -> None:
    write_config(tmp_path, bos_token="<new>", sep_token="<s>", chat_template="{{ bos_token + eos_token + sep_token }}")
    older = {"bos_token": "<old>", "eos_token": {"content": "<end>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    assert read(tmp_path).apply_chat_template(MESSAGES) == "<new><end><s>"


ADDED = {"301": {"content": "<y>"}, "300": {"content": "<x>", "special": True}, "0": {"content": BOS_TOKEN}}


@pytest.mark.parametrize(
    ("config", "text", "shown"),
    [({"eos_token": "qu"}, "a quick one", "a ick one"), ({"added_tokens_decoder": ADDED}, "a<x> b<y>", "a b<y>")],
)
def test_special_tokens_of_the_config_alone(tmp_path: Path, config: dict[str, Any], text: str, shown: str) -> None:
    write_config(tmp_path, **config)
    reference, ids = PreTrainedTokenizerFast.from_pretrained(tmp_path), read(tmp_path).encode(text)
    assert ids == reference.encode(text)
    assert streamed(read(tmp_path), ids) == reference.decode(ids, skip_special_tokens=True) == shown


def test_no_chat_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="chat template is required"):
        read(tmp_path).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('unknown role') }}",
        "{% for %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].absent.deeper }}",
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_template_that_fails_or_breaks_out(tmp_path: Path, template: str) -> None:
    write_config(tmp_path, chat_template=template)
    with pytest.raises(ModelError, match=r"chat template failed on these messages: \S"):
        read(tmp_path).apply_chat_template(MESSAGES)


# ---- the tokenizer that needs no file ----

BYTES = byte_tokenizer(512)


def test_every_token_has_a_text() -> None:
    for name in PRESETS_OF_BYTES:
        assert byte_tokenizer(PRESETS[name].vocab_size).decode([PRESETS[name].vocab_size - 1])
    assert all(BYTES.decode([i], skip_special_tokens=False) for i in range(512))
    assert len(BYTES.encode("eatonahi")) < 8  # pairs of letters are one token


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_texts_come_back(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text), skip_special_tokens=False) == text


def test_long_texts_are_the_same_tokens() -> None:
    # Long texts take another way through the library, one that lets other threads run.
    assert BYTES.encode("hello " * 2000) == BYTES.encode("hello ") * 2000


@pytest.mark.parametrize("text", ["hi", "hi " * 2000])
def test_only_the_beginning_of_a_text_that_wants_it_is_a_special_token(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == [BOS_TOKEN_ID, *tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("skipped", "text"),
    [(None, "<think>hi"), (set(), "<think>hi<|im_end|>"), ({257}, "<think>hi"), ({72, 512}, "<think>hi<|im_end|>")],
)
def test_a_stream_leaves_out_special_tokens_alone(skipped: set[int] | None, text: str) -> None:
    tokenizer = with_added("<think>")
    stream, ids = tokenizer.stream(skipped), tokenizer.encode("<think>hi<|im_end|>")
    assert ids[0] == 512
    assert "".join([*map(stream.push, ids), stream.flush()]) == text


def test_an_added_token_may_be_the_longest() -> None:
    assert with_added("<tool_response>").max_token_characters == len("<tool_response>")


def with_added(text: str) -> Tokenizer:
    """With a token that is not special."""
    raw = tokenizers.Tokenizer.from_str(BYTES.to_json())
    raw.add_tokens([text])
    return Tokenizer(raw)


def test_a_conversation_has_a_token_at_each_end_of_a_turn() -> None:
    text = BYTES.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = BYTES.encode(text, add_special_tokens=False)
    assert (ids[0], ids.count(256), ids.count(257)) == (256, 2, 1)
    assert BYTES.decode(ids) == "user\nhi\nassistant\n"


@pytest.mark.parametrize("vocab_size", [0, 257, 515])
def test_other_sizes_are_refused(vocab_size: int) -> None:
    with pytest.raises(ModelError, match=f"from 258 to 514 entries, but {vocab_size} were asked for"):
        byte_tokenizer(vocab_size)
