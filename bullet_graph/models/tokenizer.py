"""Text to token ids and back, and chat templates, from the files of a Hugging Face folder."""

import functools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, pre_tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE

from bullet_graph.errors import ModelError, PromptError
from bullet_graph.models.json_files import JsonObject, read_json_object, read_model_file

_LONG_TEXT = 4096
"""Characters that take about 1 ms to encode. Encoding longer texts, as a batch, releases the interpreter's lock."""

MAX_TEMPLATE_S = 5.0
"""Longest time to render a conversation; published templates take milliseconds."""
MAX_RENDERED_CHARS = 64 * 1024**2
_MOST_BITS = 4096
_DEADLINE = "time limit"
"""Of no variable that a template can name."""

_TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))

_TURN_BEGINS, _TURN_ENDS = "<|im_start|>", "<|im_end|>"
_LETTERS = "etaoinshrdlucmfw"
"""Their pairs fill the rest of a vocabulary, so that every token of a random model has a text."""

_CHAT_TEMPLATE = """{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""


class DetokenizeStream:
    """Incremental detokenization of one output; text once given is never revised.

    All pieces together equal ``Tokenizer.decode`` of all ids. The exception is a tokenizer with byte fallback that
    would revise text already given: a newline token followed by bytes that never form a character.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_ids: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._restart()

    def push(self, token_id: int) -> str:
        """The text that the next token adds, "" while a character is incomplete.

        A special token adds nothing. Nor does an id outside the vocabulary: models often pad their embeddings.
        """
        # The library would keep tokens without text until the next text and decode them all again at each step:
        # quadratic in an output that goes on after its end-of-sequence token.
        if token_id in self._special_ids or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._pending_ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # The library raises a bare Exception when new bytes would change text already given: a new stream goes on.
            return self._restart(self._pending_ids)
        if text is None:
            return "" if len(self._pending_ids) % 64 else self._give_up()
        self._pending_ids.clear()
        return text

    def _give_up(self) -> str:
        """The text of all pending ids but the last 4 to 7, as no character is longer; "" if those may change it."""
        ids, decode = self._pending_ids, partial(self._tokenizer.decode, skip_special_tokens=False)
        for end in range(-4, -8, -1):
            if (text := decode(ids[:end])) + decode(ids[end:]) == decode(ids):
                return text + self._restart(ids[end:])
        return ""

    def _restart(self, ids: Sequence[int] = ()) -> str:
        self._pending_ids, self._stream = list[int](), DecodeStream(skip_special_tokens=False)
        return "".join(map(self.push, ids))

    def flush(self) -> str:
        """The end of the text: held-back bytes that never became a character, each as U+FFFD."""
        return self._tokenizer.decode(self._pending_ids, skip_special_tokens=False) + self._restart()


class Tokenizer:
    """A model's tokenizer and ``chat_template``, which is Jinja source or None.

    ``tool_template`` takes its place where the model is offered tools; None: there is no other. Both may refer to
    ``special_tokens``, such as ``{"bos_token": "<s>"}``. ``num_ids`` have a token: a model may have more, or fewer.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        tool_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self.tool_template = tool_template or chat_template
        self._special_tokens = dict(special_tokens or {})
        self.num_ids = tokenizer.get_vocab_size()
        self._special_ids = frozenset(i for i, one in tokenizer.get_added_tokens_decoder().items() if one.special)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """Read the tokenizer, its config and the chat template; None for a folder without ``tokenizer.json``.

        Raises ModelError where one of the files cannot be used.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            if found := [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / name).exists()]:
                raise ModelError(
                    f"{folder} holds {found[0]} without tokenizer.json, and only the latter is read: write it with "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder); or remove "
                    f"{found[0]}, to use token ids alone"
                )
            return None
        content = read_model_file(path)
        try:
            with _no_panic():
                tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # The library raises nothing more specific.
            raise ModelError(f"{path} is not a usable tokenizer ({error}); download it again") from error
        # Settings left from training would cut prompts short without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config_path = folder / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.exists() else JsonObject(config_path, {})
        templates, special_tokens = _read_chat_templates(folder, config), _special_tokens(folder, config)
        # As in transformers: tokenizer.json may lack some of these, or have special ones as plain words.
        listed, added = _added_tokens(config), {t.content: t for t in tokenizer.get_added_tokens_decoder().values()}
        for token in listed:
            token.special |= token.content in added and added[token.content].special
        tokenizer.add_tokens([token for token in listed if repr(token) != repr(added.get(token.content))])
        added |= {token.content: token for token in listed}
        for text in special_tokens.values():
            token = added.get(text, tokenizers.AddedToken(text, normalized=False))
            if not token.special and tokenizer.token_to_id(text) is not None:
                token.special = True
                tokenizer.add_special_tokens([token])
        return cls(tokenizer, **templates, special_tokens=special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with what the tokenizer puts around it, often a begin-of-text token.

        ``add_special_tokens`` is off for the result of ``apply_chat_template``, whose text holds its special tokens.
        Raises PromptError for what is not a string, or holds half a surrogate pair; ModelError for a broken tokenizer.
        """
        try:
            with _no_panic():
                if isinstance(text, str) and len(text) > _LONG_TEXT:
                    (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
                else:
                    encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except TypeError as error:
            found = f"half a surrogate pair in {text!r:.80}" if isinstance(text, str) else type(text).__name__
            raise PromptError(f"a text to encode must be a str of valid Unicode; found {found}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids outside the vocabulary add nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own names of token ids, None for ids outside."""
        return [self._tokenizer.id_to_token(token_id) for token_id in ids]

    def stream(self, skipped_ids: Set[int] | None = None) -> DetokenizeStream:
        """A stream that leaves special tokens out of the text: all of them (None), or those of ``skipped_ids``."""
        special_ids = self._special_ids
        return DetokenizeStream(self._tokenizer, special_ids if skipped_ids is None else special_ids & skipped_ids)

    def to_json(self) -> str:
        """The tokenizer as in ``tokenizer.json``."""
        return self._tokenizer.to_str()

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token of tokenizer_config.json, if it names one."""
        return self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))

    @functools.cached_property
    def max_token_characters(self) -> int:
        """Most characters of a text that one token stands for: a longer text than that times n has over n tokens."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @functools.cached_property
    def _templates(self) -> tuple[jinja2.Template, jinja2.Template]:
        """Without tools, and with."""
        environment = _TemplateEnvironment()
        return environment.from_string(self.chat_template or ""), environment.from_string(self.tool_template or "")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a conversation, messages with ``role`` and ``content``, into a prompt, special tokens included.

        ``tools`` are those that the model may call, in OpenAI's form; arguments of calls in messages are objects.
        ``add_generation_prompt`` ends it with what opens an answer of the assistant. ``template_kwargs`` are variables
        of this template, such as ``{"enable_thinking": False}``; one that it does not use has no effect. Raises
        PromptError for another variable's name; ModelError for no template, a broken one, or one that refuses messages.
        """
        if self.chat_template is None:
            raise ModelError(
                "a chat template is required: neither chat_template.jinja nor a chat_template in "
                "tokenizer_config.json was found; pass a plain prompt instead"
            )
        own = {
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            _DEADLINE: time.monotonic() + MAX_TEMPLATE_S,
        }
        given = template_kwargs or {}
        for name in given:
            if name in own or not name.isidentifier():
                raise PromptError(
                    f"`chat_template_kwargs` must name variables of the chat template besides {', '.join(own)}; "
                    f"found {name!r:.80}"
                )
        variables = self._special_tokens | dict(given) | own
        pieces, num_chars = [], 0
        try:
            for piece in self._templates[bool(tools)].generate(variables):
                pieces.append(piece)
                num_chars += len(piece)
                _check_size(num_chars)
        except Exception as error:  # A template is a program of the model's author: it may fail in any way.
            raise ModelError(f"the model's chat template failed on these messages: {error}") from error
        return "".join(pieces)


@contextmanager
def _no_panic() -> Iterator[None]:
    """Turn a panic of the library, which is no Exception and would end the process, into a ModelError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"tokenizer.json made its library panic: {error!s:.200}") from error


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it renders what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """What Hugging Face's templates expect, in a sandbox: one may be made to run for ever or to fill the memory."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", _GenerationBlock]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        # Jinja's own filter of this name would escape HTML.
        self.filters |= {"tojson": partial(json.dumps, ensure_ascii=False), "_in_time": _in_time, "_sized": _sized}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "_in_time", [], [], None, None, lineno=loop.lineno)
        for text in list(tree.find_all(jinja2.nodes.Concat)):
            text.nodes = [jinja2.nodes.Filter(one, "_sized", [], [], None, None) for one in text.nodes]
        return tree

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_time(context)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_time(context)
        if operator == "**":
            raise jinja2.TemplateError("powers are not supported")
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MOST_BITS:
            raise jinja2.TemplateError(f"a number may have {_MOST_BITS} bits")
        if operator == "%" and isinstance(left, str) and re.search(r"%[^%a-zA-Z]*(\*|\d{4})", left):
            raise jinja2.TemplateError("a text may have no format wider than 3 digits")
        if operator in "+*" and (sizes := [len(one) for one in (left, right) if isinstance(one, Sized)]):
            _check_size(sum(sizes) * max((one for one in (left, right) if isinstance(one, int)), default=1))
        return super().call_binop(context, operator, left, right)


def _check_time(context: Context) -> None:
    if time.monotonic() > context.parent[_DEADLINE]:
        raise jinja2.TemplateError(f"it ran for longer than {MAX_TEMPLATE_S:g} s")


@jinja2.pass_context
def _in_time(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time(context)
        yield item


def _sized(item: Any) -> Any:
    """A text that ``~`` joins to another."""
    _check_size(len(item) if isinstance(item, str) else 0)
    return item


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_RENDERED_CHARS:
        raise jinja2.TemplateError(f"a text may have {MAX_RENDERED_CHARS} characters, and has {num_chars}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_chat_templates(folder: Path, config: JsonObject) -> dict[str, str | None]:
    template = config.get("chat_template")
    named: dict[Any, Any] = {"default": template}
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    for name, file in _TEMPLATE_FILES.items():
        if (folder / file).exists():
            try:
                named[name] = read_model_file(folder / file).decode("utf-8")
            except UnicodeDecodeError as error:
                raise ModelError(f"{folder / file} cannot be read as UTF-8 text: {error}") from error
    default, tool_use = named.get("default"), named.get("tool_use")
    required = str if template is not None else str | None
    if not isinstance(default, required) or not isinstance(tool_use, str | None):
        config.fail("chat_template", "a string, or a list with a template named default")
    return {"chat_template": default, "tool_template": tool_use}


def _special_tokens(folder: Path, config: JsonObject) -> dict[str, str]:
    path = folder / "special_tokens_map.json"
    # Older folders have some of them only there; newer ones need not have that file.
    older = read_json_object(path) if path.exists() else JsonObject(path, {})
    tokens = {}
    for name in _SPECIAL_TOKENS:
        source = older if config.get(name) is None else config
        value = source.get(name)
        # Older files store a token with its matching options.
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str) and content == content.encode(errors="ignore").decode():
            tokens[name] = content
        elif content is not None:
            source.fail(name, "a string of valid Unicode, or an object with such a content")
    return tokens


def _added_tokens(config: JsonObject) -> list[tokenizers.AddedToken]:
    """Those of tokenizer_config.json, by id."""
    entries = config.with_defaults(added_tokens_decoder={}).nested("added_tokens_decoder").values
    try:
        return [tokenizers.AddedToken(**entries[key]) for key in sorted(entries, key=int)]
    except (TypeError, ValueError):
        config.fail("added_tokens_decoder", "an object of tokens' texts and options by id")


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer that needs no file: bytes, two tokens around a turn of a conversation, and pairs of letters.

    Raises ModelError where ``vocab_size`` is not in [258, 514].
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
