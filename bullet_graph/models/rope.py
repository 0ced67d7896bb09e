"""Tables of rotary position embeddings."""

import math

import torch
from torch import Tensor

from bullet_graph.models.config import Llama3RopeScaling, ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotation per position for each pair of dimensions, [head_dim / 2] float32.

    theta ** (-2i / head_dim) (Su et al. 2021, section 3.2.2), slowed as ``rope_scaling`` says.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    return inv_freq if config.rope_scaling is None else _scale_llama3(inv_freq, config.rope_scaling)


def _scale_llama3(inv_freq: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Slow long wavelengths by ``factor``, keep short ones, blend between (Llama 3.1 reference code)."""
    wavelength = 2 * math.pi / inv_freq
    context = scaling.original_max_position_embeddings
    blend = (context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0, 1)
    return inv_freq * (blend + (1 - blend) / scaling.factor)


def cos_sin_table(config: ModelConfig, max_positions: int, device: torch.device) -> Tensor:
    """Cosines, then sines, by position: [max_positions, head_dim] float32."""
    angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(config))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
