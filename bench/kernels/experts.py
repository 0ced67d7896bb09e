"""A layer's experts by tokens and router skew: the engine's kernels, torch's grouped product, and FlashInfer's CUTLASS.

    python -m bench.kernels.experts --output-json bench/results/h200/experts.json

All take the router's logits and are captured. TB/s are of the weights of those experts that any row goes to. In FP8,
the engine's kernels alone are measured.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from bench.kernels.harness import DEVICE, GpuCommand, Run, burst_us, output_option, parse_counts, random_tensor
from bench.record import write_report
from bullet_graph.kernels.ops import Experts, route
from bullet_graph.kernels.triton_moe import experts_output
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.layers import Mixture
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import fill_dummy, skewed_router_bias, zero_weights

WAYS = ("engine,grouped_mm,cutlass", "engine,grouped_mm", "engine")


def ways(x: Tensor, logits: Tensor, experts: Experts) -> dict[str, Run]:
    gate_up, down, top_k = experts.gate_up.weight, experts.down.weight, experts.top_k
    engine: Run = lambda: experts_output(x, logits, experts)  # noqa: E731
    if experts.gate_up.scale is not None:
        return {"engine": engine}

    def grouped() -> Tensor:
        weights, chosen = route(logits, top_k, renormalize=experts.renormalize)
        order = chosen.flatten().argsort(stable=True)
        ends = (chosen.view(-1, 1) == torch.arange(len(down), device=DEVICE)).sum(0).cumsum(0, dtype=torch.int32)
        product = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
        outputs = torch._grouped_mm(TritonOps.act_and_mul(product), down.transpose(1, 2), offs=ends)
        return (outputs[order.argsort()].view(*chosen.shape, -1) * weights[..., None]).sum(1)

    def cutlass() -> Any:
        from flashinfer.fused_moe import cutlass_fused_moe  # noqa: PLC0415 - it compiles for minutes

        weights, chosen = route(logits, top_k, renormalize=experts.renormalize)
        return cutlass_fused_moe(x, chosen.int(), weights, gate_up, down, x.dtype, quant_scales=[])

    return {"engine": engine, "grouped_mm": grouped, "cutlass": cutlass}


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice([n for n, m in PRESETS.items() if m.num_experts]), default="qwen3-30b-a3b")
@click.option("--tokens", default="1,4,16,64,128,256,512,2048,8192", callback=parse_counts)
@click.option("--ways", "wanted", type=click.Choice(WAYS), default=WAYS[0])
@output_option
def main(model: str, tokens: tuple[int, ...], wanted: str, output_json: Path) -> None:
    config, cases = replace(PRESETS[model], num_layers=1), list[dict[str, Any]]()
    count, top_k = config.num_experts, config.experts_per_token
    weights = zero_weights(config, dtype=torch.bfloat16, device=DEVICE)
    for _ in fill_dummy(config, weights, seed=0):
        pass
    mixture = weights.layers[0].mlp
    assert isinstance(mixture, Mixture)
    experts = mixture.experts
    of_expert = (
        sum(t.nbytes for e in (experts.gate_up, experts.down) for t in (e.weight, e.scale) if t is not None) / count
    )
    for skew in (0.0, 0.7, 1.2):
        for rows in tokens:
            x, bias = random_tensor(rows, config.hidden_size), skewed_router_bias(count, top_k, skew).to(DEVICE)
            logits = (torch.randn(rows, count, device=DEVICE) + bias).bfloat16()
            touched = len(logits.topk(top_k).indices.unique())
            for name, run in ((n, r) for n, r in ways(x, logits, experts).items() if n in wanted.split(",")):
                us = burst_us(run)
                rate = touched * of_expert / us / 1e6
                cases.append({"skew": skew, "rows": rows, "name": name, "touched": touched, "us": us, "tb_per_s": rate})
                click.echo(f"zipf:{skew} {rows:5} rows {name:10} {us:9.1f} us, {touched} experts, {rate:.2f} TB/s")
    write_report(output_json, {"model": model, "cases": cases})


if __name__ == "__main__":
    main()
