"""SmolLM3: as Llama, but some layers do not encode positions."""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config
from bullet_graph.models.json_files import JsonObject


def read_smollm3(config: JsonObject) -> ModelConfig:
    config = config.with_defaults(tie_word_embeddings=True, rope_theta=2000000.0)
    model = read_dense_config(config)
    interval = config.read("no_rope_layer_interval", int, default=4)
    # 1 where a layer has RoPE, despite the key's name.
    layers = config.get("no_rope_layers")
    if layers is None:
        layers = [int((layer + 1) % interval != 0) for layer in range(model.num_layers)]
    if not isinstance(layers, list) or len(layers) < model.num_layers or not all(x in (0, 1) for x in layers):
        config.fail("no_rope_layers", f"a list of 0 or 1 for each of {model.num_layers} layers")
    ropes = tuple(model.rope if has_rope else None for has_rope in layers[: model.num_layers])
    return replace(model, layer_ropes=ropes)
