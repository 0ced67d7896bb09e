"""Model folders made to stop the process: each ends in a ModelError, soon."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoints import write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bullet_graph.errors import ModelError
from bullet_graph.models import json_files
from bullet_graph.models import tokenizer as tokenizer_module
from bullet_graph.models.checkpoint import open_checkpoint
from bullet_graph.models.presets import load_model_config
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.models.weights import weight_shapes

READ_WHOLE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
DIMENSIONS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "qwen3")
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """As in a hub's cache: a folder of links."""
    for file in written.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def read_everything(folder: Path) -> None:
    config = load_model_config(folder)
    Tokenizer.from_folder(folder)
    with open_checkpoint(folder, config):
        pass


def replace(path: Path, content: str | bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    replace(path, json.dumps(json.loads(path.read_bytes()) | changes))


@pytest.mark.parametrize("name", [*READ_WHOLE, "chat_template.jinja", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_not_read(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(ModelError, match=rf"{name} (must be a regular file|cannot be read)"):
        read_everything(folder)


@pytest.mark.parametrize("name", [*READ_WHOLE, "chat_template.jinja"])
def test_a_huge_file_is_not_read(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max((folder / other).stat().st_size for other in READ_WHOLE)
    monkeypatch.setattr(json_files, "MAX_FILE_BYTES", largest)
    replace(folder / name, b" " * (largest + 1))
    with pytest.raises(ModelError, match=rf"{name} must have at most {largest} bytes; found {largest + 1}"):
        read_everything(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ['{"a":' * 100_000, "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_json_that_no_parser_takes(folder: Path, name: str, content: str) -> None:
    replace(folder / name, content)
    with pytest.raises(ModelError, match=name):
        read_everything(folder)


@pytest.mark.parametrize("depth", [300, 900])
def test_a_nested_value_is_shown_in_short(folder: Path, depth: int) -> None:
    change_config(folder, hidden_size=json.loads("[" * depth + "]" * depth))
    with pytest.raises(ModelError, match="hidden_size must be") as caught:
        load_model_config(folder)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("key", DIMENSIONS)
@pytest.mark.parametrize("value", [3 * 10**8, 10**19, 10**400])
def test_absurd_dimensions(folder: Path, key: str, value: int) -> None:
    change_config(folder, **{key: value})
    # The longest context may be large: it only bounds requests.
    if key == "max_position_embeddings" and value < 2**31:
        assert load_model_config(folder).max_position_embeddings == value
    else:
        with pytest.raises(ModelError, match=f"{key} must be|num_key_value_heads must be"):
            load_model_config(folder)


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_number_beyond_floats(folder: Path, key: str) -> None:
    change_config(folder, rope_parameters=None, **{key: 10**400})
    with pytest.raises(ModelError, match=f"{key} must be a finite number"):
        load_model_config(folder)


def test_the_largest_dimensions_need_no_memory(folder: Path) -> None:
    """Shapes alone must not take long or allocate: the ledger refuses the model afterwards."""
    change_config(folder, num_hidden_layers=1024, hidden_size=2**20, intermediate_size=2**20, vocab_size=2**24)
    assert len(weight_shapes(load_model_config(folder))) > 1024


def test_many_end_of_sequence_tokens(folder: Path) -> None:
    replace(folder / "generation_config.json", json.dumps({"eos_token_id": [1] * 2000}))
    with pytest.raises(ModelError, match="eos_token_id must be at most 1024 token ids"):
        load_model_config(folder)


def encode(folder: Path, text: str) -> list[int]:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer.encode(text)


@pytest.mark.parametrize("charsmap", ["", "AAAA", "/////w==", "AQAAAAA="])
def test_a_normalizer_that_panics(folder: Path, charsmap: str) -> None:
    """The last one panics when it is used, not when it is read."""
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_bytes())
    fields["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    replace(path, json.dumps(fields))
    for text in ("h\u00e9llo", "h\u00e9llo " * 2000):
        with pytest.raises(ModelError, match=r"tokenizer\.json (is not a usable|made its library panic)"):
            encode(folder, text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_change_of_a_config_is_a_model_or_a_model_error(folder: Path, written: Path, data: Any) -> None:
    fields = json.loads((written / "config.json").read_bytes())
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(fields)), JSON, max_size=3))
    replace(folder / "config.json", json.dumps(fields | changes))
    with suppress(ModelError):
        weight_shapes(load_model_config(folder))


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x = range(99999) %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set x = 'x' * 60000000 %}" + "{% set y = x + 'y' %}" * 100,
    ],
)
def test_a_template_that_never_ends(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_TEMPLATE_S", 0.3)
    start_s = time.monotonic()
    with pytest.raises(ModelError, match=r"it ran for longer than 0\.3 s"):
        render(template)
    assert time.monotonic() - start_s < 5


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(9999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 'x' * 1000000000000 }}",
        "{{ 1000000000000 * 'x' }}",
        "{% set ns = namespace(x='x' * 1000) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{% set ns = namespace(x='x' * 1000) %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set x = 7 %}" + "{% set x = x * x %}" * 30,
        "{% set x = ('f' * 2000000) | int(0, 16) %}{{ x // 3 }}",
        "{{ '%600000000d' % 1 }}",
        "{% set x = 'x' * 30000 %}{{ x * x }}",
    ],
)
def test_a_template_that_fills_the_memory(template: str) -> None:
    with pytest.raises(ModelError, match=r"a (text|number) may have|powers are not supported|can't multiply"):
        render(template)


def test_what_templates_may_do() -> None:
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{{ '-' * 3 + m.content }}"
        "{% endfor %}{{ 2 * 3 + 1 }}{{ 20 // 3 - 5 }}{{ '2024%03d' % 7 }}{{ ([1] + [2]) | length }}"
        "{% for k, v in {'a': 1}.items() if v %}{{ k }}{% endfor %}"
    )
    assert render(template) == "1/2,---hello2/2---you7120240072a"


def render(template: str) -> str:
    empty = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=template)
    return empty.apply_chat_template([{"role": "user", "content": text} for text in ("hello", "you")])
