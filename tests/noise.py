"""Outputs of an engine in bfloat16, measured by what bfloat16 costs ``transformers``; all on the GPU."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bullet_graph.engine.output import RequestOutput


@dataclass(frozen=True)
class Checkpoint:
    """A small checkpoint in bfloat16, and ``transformers`` on it in float32 and in bfloat16."""

    folder: Path
    exact: PreTrainedModel
    rounded: PreTrainedModel


def check_against_transformers(outputs: list[RequestOutput], model: Checkpoint) -> None:
    """Chosen tokens and log-probabilities, held against float32 given what the engine generated before.

    The measure is what bfloat16 costs ``transformers`` itself on the same tokens.
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
        reported = torch.tensor([entry.logprob for entry in completion.logprobs], device="cuda")
        errors.append(reported - chosen)
        noise.append(rounded.gather(-1, tokens)[:, 0] - chosen)
        regrets.append(exact.max(-1).values - chosen)
    rms_error, rms_noise = (torch.cat(values).square().mean().sqrt() for values in (errors, noise))
    assert rms_error < 1.5 * rms_noise
    assert torch.cat(regrets).max() < 4 * torch.cat(noise).abs().max()
