"""The whole engine on the GPU: tokens against ``transformers``, memory, preemption, good manners."""

from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bullet_graph import Engine, SamplingParams
from bullet_graph.engine.output import RequestOutput

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
LENGTHS = (1, 5, 16, 17, 100, 255, 600, 33)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen3ForCausalLM]:
    folder = tmp_path_factory.mktemp("qwen3")
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
    network = Qwen3ForCausalLM(config).bfloat16().eval()
    network.save_pretrained(folder)
    return folder, network.cuda()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 1000, size=n).tolist() for n in LENGTHS]


def check_against_transformers(outputs: list[RequestOutput], network: Qwen3ForCausalLM) -> None:
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
            exact = network.float()(ids).logits[0, rows].float().log_softmax(-1)
            rounded = network.bfloat16()(ids).logits[0, rows].float().log_softmax(-1)
        chosen = exact.gather(-1, tokens)[:, 0]
        reported = torch.tensor([entry.logprob for entry in completion.logprobs], device="cuda")
        errors.append(reported - chosen)
        noise.append(rounded.gather(-1, tokens)[:, 0] - chosen)
        regrets.append(exact.max(-1).values - chosen)
    rms_error, rms_noise = (torch.cat(values).square().mean().sqrt() for values in (errors, noise))
    assert rms_error < 1.5 * rms_noise
    assert torch.cat(regrets).max() < 4 * torch.cat(noise).abs().max()


@pytest.mark.parametrize("arm", ["serial", "mixed", "mixed:64"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_against_transformers(
    model: tuple[Path, Qwen3ForCausalLM], arm: str, cuda_graphs: bool
) -> None:
    folder, network = model
    with Engine(
        str(folder), arm=arm, max_num_seqs=6, kv_cache_bytes=2**28, cuda_graphs=cuda_graphs
    ) as engine:
        outputs = engine.generate(prompts(), GREEDY, use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [GREEDY.max_tokens] * len(LENGTHS)
        assert engine.stats().kv_blocks_used == 0
    check_against_transformers(outputs, network)


def test_preemption_loses_nothing(model: tuple[Path, Qwen3ForCausalLM]) -> None:
    folder, network = model
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=1)
    with Engine(
        str(folder), max_num_seqs=6, max_model_len=720, kv_cache_bytes=60 * 3 * 2 * 16 * 256 * 2
    ) as engine:
        outputs = engine.generate(prompts(), params, use_tqdm=False)
        stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.kv_blocks_used == 0
    check_against_transformers(outputs, network)


def test_seeded_sampling_repeats(model: tuple[Path, Qwen3ForCausalLM]) -> None:
    folder, _ = model
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True, n=2)
    with Engine(str(folder), max_num_seqs=8, kv_cache_bytes=2**28) as engine:
        first, second = (engine.generate([[1, 2, 3]], params, use_tqdm=False)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert first.outputs[0].token_ids != first.outputs[1].token_ids


def test_shutdown_gives_the_memory_back_and_no_process_is_left(model: tuple[Path, Qwen3ForCausalLM]) -> None:
    folder, _ = model
    free = []
    allocated = torch.cuda.memory_allocated()
    for _ in range(3):
        with Engine(str(folder), max_num_seqs=8, kv_cache_bytes=2**30) as engine:
            engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
            assert psutil.Process().children(recursive=True) == []
        assert torch.cuda.memory_allocated() == allocated
        free.append(torch.cuda.mem_get_info()[0])
    # The first engine loads kernels that stay with the process; later ones leave nothing behind.
    assert abs(free[2] - free[1]) < 64 * 1024**2
