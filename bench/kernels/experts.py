"""A layer's experts by tokens and router skew: the engine's kernels, torch's grouped product, and FlashInfer's CUTLASS.

    python -m bench.kernels.experts --output-json bench/results/h200/experts.json

All take the router's logits and are captured. TB/s are of the weights of those experts that any row goes to.
"""

from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from bench.kernels.harness import DEVICE, GpuCommand, Run, burst_us, output_option, parse_counts, random_tensor
from bench.record import write_report
from bullet_graph.kernels.ops import Experts, Linear, route
from bullet_graph.kernels.triton_moe import experts_output
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import skewed_router_bias


def ways(x: Tensor, logits: Tensor, experts: Experts) -> dict[str, Run]:
    gate_up, down, top_k = experts.gate_up.weight, experts.down.weight, experts.top_k

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

    return {"engine": lambda: experts_output(x, logits, experts), "grouped_mm": grouped, "cutlass": cutlass}


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice([n for n, m in PRESETS.items() if m.num_experts]), default="qwen3-30b-a3b")
@click.option("--tokens", default="1,4,16,64,128,256,512,2048,8192", show_default=True, callback=parse_counts)
@output_option
def main(model: str, tokens: tuple[int, ...], output_json: Path) -> None:
    """Measure the experts of one layer of a model."""
    config, cases = PRESETS[model], list[dict[str, Any]]()
    count, top_k, size = config.num_experts, config.experts_per_token, config.expert_intermediate_size
    gate_up, down = ((count, 2 * size, config.hidden_size), (count, config.hidden_size, size))
    fused, last = (Linear(random_tensor(*shape, std=shape[2] ** -0.5)) for shape in (gate_up, down))
    experts = Experts(Linear(random_tensor(count, 1)), fused, last, top_k, config.renormalize_experts)
    for skew in (0.0, 0.7, 1.2):
        for rows in tokens:
            x, bias = random_tensor(rows, config.hidden_size), skewed_router_bias(count, top_k, skew).to(DEVICE)
            logits = (torch.randn(rows, count, device=DEVICE) + bias).bfloat16()
            touched = len(logits.topk(top_k).indices.unique())
            for name, run in ways(x, logits, experts).items():
                us = burst_us(run)
                rate = touched * 2 * 3 * size * config.hidden_size / us / 1e6
                cases.append({"skew": skew, "rows": rows, "name": name, "touched": touched, "us": us, "tb_per_s": rate})
                click.echo(f"zipf:{skew} {rows:5} rows {name:10} {us:9.1f} us, {touched} experts, {rate:.2f} TB/s")
    write_report(output_json, {"model": model, "cases": cases})


if __name__ == "__main__":
    main()
