"""Built-in model shapes, for dummy weights: no file is needed to run them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from bullet_graph.errors import ModelError
from bullet_graph.models.config import Llama3RopeScaling, ModelConfig, load_model_config

# The end-of-sequence tokens of the instruct models: <|end_of_text|>, <|eom_id|>, <|eot_id|>.
_LLAMA3_EOS_TOKEN_IDS = (128001, 128008, 128009)

# <|im_end|> and <|endoftext|>.
_QWEN3_EOS_TOKEN_IDS = (151645, 151643)


def _llama3_rope_scaling(factor: float) -> Llama3RopeScaling:
    return Llama3RopeScaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=512,
            hidden_size=128,
            intermediate_size=384,
            num_layers=4,
            # Heads of 64: the smallest that the GPU's attention kernels come in.
            num_heads=2,
            num_kv_heads=1,
            head_dim=64,
            # Long enough for the prompts of the long-document trace.
            max_position_embeddings=16384,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            rope_scaling=None,
            tie_word_embeddings=False,
            qkv_bias=False,
            qk_norm=False,
            dtype="float32",
            eos_token_ids=(),
        ),
        "llama-3.2-1b": ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=_llama3_rope_scaling(32.0),
            tie_word_embeddings=True,
            qkv_bias=False,
            qk_norm=False,
            dtype="bfloat16",
            eos_token_ids=_LLAMA3_EOS_TOKEN_IDS,
        ),
        "llama-3.1-8b": ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=_llama3_rope_scaling(8.0),
            tie_word_embeddings=False,
            qkv_bias=False,
            qk_norm=False,
            dtype="bfloat16",
            eos_token_ids=_LLAMA3_EOS_TOKEN_IDS,
        ),
        "qwen3-0.6b": ModelConfig(
            architecture="Qwen3ForCausalLM",
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            rope_scaling=None,
            tie_word_embeddings=True,
            qkv_bias=False,
            qk_norm=True,
            dtype="bfloat16",
            eos_token_ids=_QWEN3_EOS_TOKEN_IDS,
        ),
        "qwen3-8b": ModelConfig(
            architecture="Qwen3ForCausalLM",
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            rope_scaling=None,
            tie_word_embeddings=False,
            qkv_bias=False,
            qk_norm=True,
            dtype="bfloat16",
            eos_token_ids=_QWEN3_EOS_TOKEN_IDS,
        ),
    }
)
"""Shapes and constants of published models (and of ``tiny``, for CPUs), by name."""


PRESETS_OF_BYTES = frozenset({"tiny"})
"""Presets whose texts are read and written byte by byte (``byte_tokenizer``); the others take token ids alone."""


def resolve_model(name_or_path: str) -> tuple[ModelConfig, Path | None]:
    """The config of a model folder, with its path, or of a preset, with None; a folder comes first.

    Raises:
        ModelError: neither a folder nor a preset, or the folder's config.json cannot be used.
    """
    folder = Path(name_or_path)
    if folder.is_dir():
        return load_model_config(folder), folder
    if name_or_path in PRESETS:
        return PRESETS[name_or_path], None
    raise ModelError(
        f"unknown model {name_or_path!r}: expected a folder with config.json, "
        f"or one of the presets {', '.join(PRESETS)}"
    )
