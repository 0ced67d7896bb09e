"""Outputs of an engine in bfloat16, measured by what bfloat16 costs ``transformers``; all on the GPU."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bullet_graph.engine.output import RequestOutput


@dataclass(frozen=True)
class Checkpoint:
    """A small checkpoint in bfloat16, and ``transformers`` on it in float32 and in bfloat16."""

    folder: Path
    exact: PreTrainedModel
    rounded: PreTrainedModel

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        # Loaded twice: converting a module in place would round its rotary table, too.
        exact, rounded = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().cuda()
            for dtype in (torch.float32, torch.bfloat16)
        )
        return cls(folder, exact, rounded)


def qwen3_checkpoint(folder: Path) -> Checkpoint:
    """A random Qwen3 of 1,000 tokens, written to the folder."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        initializer_range=0.1,
        max_position_embeddings=2048,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return Checkpoint.read(folder)


def check_against_transformers(outputs: list[RequestOutput], model: Checkpoint) -> None:
    """Chosen tokens and log-probabilities, held against float32 given what the engine generated before.

    The measure is what bfloat16 costs ``transformers`` itself on the same tokens. Of a mixture of experts, typical
    tokens count: rounding sends a few to another expert, and not those of ``transformers``.
    """
    errors, regrets, noise = [], [], []
    for output in outputs:
        completion = output.outputs[0]
        ids = torch.tensor([[*output.prompt_token_ids, *completion.token_ids]], device="cuda")
        rows = slice(len(output.prompt_token_ids) - 1, -1)
        tokens = torch.tensor(completion.token_ids, device="cuda")[:, None]
        with torch.inference_mode():
            exact = model.exact(ids).logits[0, rows].float().log_softmax(-1)
            rounded = model.rounded(ids).logits[0, rows].float().log_softmax(-1)
        chosen = exact.gather(-1, tokens)[:, 0]
        errors.append(torch.tensor([entry.logprob for entry in completion.logprobs], device="cuda") - chosen)
        noise.append(rounded.gather(-1, tokens)[:, 0] - chosen)
        regrets.append(exact.max(-1).values - chosen)
    error, rounding, regret = (torch.cat(values).abs() for values in (errors, noise, regrets))
    if hasattr(model.exact.config, "num_experts_per_tok"):
        assert error.median() < 1.5 * rounding.median()
        assert regret.quantile(0.9) < 4 * rounding.quantile(0.9)
        return
    assert error.square().mean().sqrt() < 1.5 * rounding.square().mean().sqrt()
    assert regret.max() < 4 * rounding.max()
