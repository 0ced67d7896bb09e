"""Small random Hugging Face checkpoints, for tests to compare with ``transformers``."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

Family = str
"""One of these: a type of models as ``transformers`` names it; ``gemma3`` is that of texts."""

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
MORE_FAMILIES: tuple[Family, ...] = ("gemma3", "granite", "olmo2", "phi3", "smollm3")
EXPERT_FAMILIES: tuple[Family, ...] = ("mixtral", "qwen2_moe", "qwen3_moe")

BOS_TOKEN, EOS_TOKEN = "<|bos|>", "<|eos|>"
BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1

# Greedy outputs of 40 tokens hold about 30 different ones, while float32 log-probabilities stay within 2e-5 of
# float64's. Twice as much makes attention so sharp that rounding shows at 1e-4.
_WEIGHT_STD = 0.2

CHAT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- "[" + message.role + "] " + message.content | trim + eos_token + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "[" + (speaker or "assistant") + "] " }}
{%- endif %}
"""

_TRAINING_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A request waits in the queue; then its prompt is prefilled and its tokens are decoded.",
    "你好,世界。今天天气很好。",
)


def write_checkpoint(
    folder: Path,
    family: Family,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    num_layers: int = 2,
    tie: bool = False,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    **changes: Any,
) -> PreTrainedModel:
    """Write a random checkpoint of a model family and return the model it holds, in ``dtype``.

    Norms and biases are random too, so that none can be dropped or mixed up unseen. The vocabulary exceeds the
    tokenizer's 300, as published models have it. ``shards`` above 1 are at least as many files, and an index.
    ``changes`` are of the config's keys.
    """
    model = _random_model(_config(family, vocab_size, num_layers, tie, changes), seed).to(dtype)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=num_bytes if shards == 1 else num_bytes // shards)
    if tokenizer:
        write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer with a chat template; id 0 begins a text and id 1 ends it."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A", special_tokens=[(BOS_TOKEN, BOS_TOKEN_ID)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _config(family: Family, vocab_size: int, num_layers: int, tie: bool, changes: dict[str, Any]) -> PretrainedConfig:
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tie,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": None,
    }
    if family == "llama":
        # An original length far below the prompts' lengths, so that the scaling changes what tests see.
        rope_scaling = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        own: dict[str, Any] = {"rope_theta": 10000.0, "rope_scaling": rope_scaling}
    elif family == "mistral":
        # A window below most prompts' lengths, and no multiple of a chunk or block.
        own = {"sliding_window": 21}
    elif family == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        ropes = {"rope_type": "default", "rope_theta": 100.0}, {"rope_type": "linear", "factor": 4.0}
        own = {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 21,
            "layer_types": (kinds * num_layers)[:num_layers],
            "rope_parameters": dict(zip(kinds, ropes, strict=True)),
        }
    elif family == "granite":
        own = {"embedding_multiplier": 6.0, "attention_multiplier": 0.1}
        own |= {"residual_multiplier": 0.6, "logits_scaling": 0.7}
    elif family == "phi3":
        own = {"partial_rotary_factor": 0.75, "sliding_window": 21}
    elif family == "smollm3":
        own = {"no_rope_layers": ([0, 1] * num_layers)[:num_layers]}
    elif family == "mixtral":
        own = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 21}
    elif family in ("qwen2_moe", "qwen3_moe"):
        own = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
        if family == "qwen2_moe":
            own |= {"shared_expert_intermediate_size": 80, "use_sliding_window": True, "sliding_window": 21}
        else:
            own |= {"head_dim": 32, "norm_topk_prob": True}
    elif family == "qwen3":
        own = {"head_dim": 32}  # not hidden_size / num_heads
    else:
        own = {}
    return AutoConfig.for_model("gemma3_text" if family == "gemma3" else family, **{**shape, **own, **changes})


def _random_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0.0, 0.5, generator=generator)
        elif parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0.0, _WEIGHT_STD * (64 / config.hidden_size) ** 0.5, generator=generator)
    return model
