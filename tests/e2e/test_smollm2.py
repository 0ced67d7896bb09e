"""A real pretrained model on the CPU: tokens, perplexity and a chat, against ``transformers`` on the same weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engines import Model, prompt_scores
from servers import serving
from smollm2 import TEXT, smollm2_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from bullet_graph import Engine, SamplingParams

LONG, SCORED = 600, 120
"""Tokens of the long prompt, and how many of them the perplexity is of."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = (
    "The capital of France is",
    "La mer, qu'on voit danser le long des golfes clairs, a des reflets",
    "Über allen Gipfeln ist Ruh, in allen Wipfeln spürest du kaum einen",
    "La vida es un frenesí, una ilusión, una sombra, una",
    "Мой дядя самых честных правил, когда не в шутку",
    "吾輩は猫である。名前はまだ",
    "床前明月光,疑是地上霜。举头望明月,",
    "السلام عليكم ورحمة الله",
    "🙂🙂👍🏽 Emojis are fun: 🎉👩‍👩‍👧",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "SELECT name, COUNT(*) FROM users WHERE age > 30 GROUP BY",
    "1, 2, 4, 8, 16, 32,",
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    folder = smollm2_folder(request.config)
    return Model(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def long_prompt(model: Model) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(model.folder)(TEXT)["input_ids"]
    return ids[:LONG]


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    with Engine(str(model.folder), device="cpu", max_model_len=1024, max_num_seqs=16, kv_cache_bytes=2**28) as engine:
        yield engine


def test_tokens_in_several_languages_equal(model: Model, engine: Engine) -> None:
    theirs = AutoTokenizer.from_pretrained(model.folder)
    outputs = engine.generate(list(PROMPTS), GREEDY, use_tqdm=False)
    wholes = [torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids]) for output in outputs]
    with torch.inference_mode():
        # What stands behind a text does not change its logits.
        found = model.network(torch.nn.utils.rnn.pad_sequence(wholes, batch_first=True)).logits.argmax(-1)
    for prompt, output, whole, greedy in zip(PROMPTS, outputs, wholes, found, strict=True):
        (completion,) = output.outputs
        assert list(output.prompt_token_ids) == theirs(prompt)["input_ids"]
        assert completion.text == theirs.decode(completion.token_ids, skip_special_tokens=True)
        expected = greedy[len(output.prompt_token_ids) - 1 : len(whole) - 1]
        assert completion.token_ids == tuple(expected.tolist()), prompt
    assert outputs[0].outputs[0].text.startswith(" Paris")


def test_tokens_after_a_long_prompt_and_perplexity_equal(model: Model, engine: Engine, long_prompt: list[int]) -> None:
    (output,) = engine.generate(long_prompt, GREEDY, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    expected = model.logits([*long_prompt, *tokens], [*range(SCORED), *range(LONG - 1, LONG + len(tokens) - 1)])
    assert tokens == tuple(expected[SCORED:].argmax(-1).tolist())
    scored, followers = long_prompt[:SCORED], torch.tensor(long_prompt[1:SCORED])
    theirs = torch.nn.functional.cross_entropy(expected[: SCORED - 1], followers)
    assert float(prompt_scores(engine, scored).mean().neg().exp()) == pytest.approx(float(theirs.exp()), rel=1e-3)


def test_fp8_costs_the_accuracy_of_its_format_and_no_more(model: Model, long_prompt: list[int]) -> None:
    scored = long_prompt[:SCORED]
    plain = _perplexity(model, scored)
    with _fp8_linears(model.network):
        emulated = _perplexity(model, scored)
    ours = {}
    for kv_cache_dtype in ("auto", "fp8"):
        settings = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 1, "kv_cache_bytes": 2**26}
        settings |= {"quantization": "fp8", "kv_cache_dtype": kv_cache_dtype}
        with Engine(str(model.folder), **settings) as engine:  # type: ignore[arg-type]
            ours[kv_cache_dtype] = float(prompt_scores(engine, scored).mean().neg().exp())
    assert ours["auto"] == pytest.approx(emulated, rel=2e-3)
    assert ours["auto"] == pytest.approx(plain, rel=0.05)
    assert ours["fp8"] == pytest.approx(plain, rel=0.07)


def _perplexity(model: Model, ids: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(model.logits(ids)[:-1], torch.tensor(ids[1:])).exp())


@contextmanager
def _fp8_linears(network: torch.nn.Module) -> Iterator[None]:
    """Round weights, by output channel, and inputs, by token, of all projections to FP8, in `transformers`' network."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    layers = [m for name, m in network.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    before = [layer.weight.data for layer in layers]
    for layer in layers:
        layer.weight.data = rounded(layer.weight.data)
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, weight in zip(layers, before, strict=True):
            layer.weight.data = weight


def test_a_chat_over_the_server(model: Model) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    theirs = AutoTokenizer.from_pretrained(model.folder)
    with serving(model.folder, max_model_len=256, kv_cache_bytes=2**26) as served:
        answer = served.post("/v1/chat/completions", messages=messages, temperature=0, return_token_ids=True).json()
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert "Paris" in choice["message"]["content"]
    # The model ends its turn by itself.
    assert choice["finish_reason"] == "stop"
