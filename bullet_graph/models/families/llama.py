"""Llama 3.x: no biases; from 3.1 on, RoPE's low frequencies are scaled."""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig
from bullet_graph.models.rope import Llama3RopeScaling, Rope

_SCALING = Llama3RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)

LLAMA_3_1_8B = ModelConfig(
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
    rope=Rope(500000.0, _SCALING),
    dtype="bfloat16",
    # Of the instruct models: <|end_of_text|>, <|eom_id|>, <|eot_id|>.
    eos_token_ids=(128001, 128008, 128009),
)

LLAMA_3_1_70B = replace(LLAMA_3_1_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)

LLAMA_3_2_1B = replace(
    LLAMA_3_1_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    rope=Rope(500000.0, replace(_SCALING, factor=32.0)),
    tie_word_embeddings=True,
)

TINY = replace(
    LLAMA_3_1_8B,
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
    rope=Rope(10000.0),
    dtype="float32",
    eos_token_ids=(),
)
"""For CPUs and tests."""
