"""What a decoder looks like, read from a Hugging Face ``config.json``."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3's frequency-dependent RoPE scaling (Llama 3.1 model card; ``rope_type: llama3``).

    Attributes:
        factor: by how much the lowest frequencies are slowed.
        low_freq_factor: wavelengths above ``original_max_position_embeddings / low_freq_factor`` scale fully.
        high_freq_factor: wavelengths below ``original_max_position_embeddings / high_freq_factor`` stay.
        original_max_position_embeddings: context length before scaling, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a dense decoder (Llama 3.x, Qwen2/2.5, Qwen3).

    Attributes:
        architecture: the Hugging Face class name, such as ``LlamaForCausalLM``.
        qkv_bias: the q, k and v projections have a bias (Qwen2).
        qk_norm: RMSNorm over each query and key head before RoPE (Qwen3).
        dtype: the checkpoint's own dtype.
        eos_token_ids: tokens that end an output, unless a request ignores them; may be empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Columns of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key (or all value) heads together."""
        return self.num_kv_heads * self.head_dim
