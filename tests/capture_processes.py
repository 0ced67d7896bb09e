"""A program whose engine serves a few requests, perhaps from a capture cache, and that tells what it compiled."""

from bullet_graph import SamplingParams

PROMPTS = [[1, 2, 3, 4, 5], [9] * 40, [7]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

COMPILERS = ("torch._dynamo", "torch._inductor", "sympy", "triton")
START = f"""
import dataclasses, json, sys
from bullet_graph import Engine, SamplingParams
from bullet_graph.graphs.compile_counts import CompileCounter
settings, prompts = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sampling = SamplingParams(temperature=0, max_tokens={GREEDY.max_tokens}, ignore_eos=True)
with Engine(**settings) as engine, CompileCounter(gpu=settings["device"] == "cuda") as serving:
    compilers = [name for name in {COMPILERS} if name in sys.modules]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
print(json.dumps({{
    "compilers": compilers,
    "start": dataclasses.asdict(engine.compiles),
    "serving": dataclasses.asdict(serving.counts),
    "use": dataclasses.asdict(engine.cache_use),
    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    "imports_flashinfer": "flashinfer" in sys.modules,
}}))
"""
