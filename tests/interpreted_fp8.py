"""FP8 in Triton's interpreter, which loses the carry of a number that rounds up to the next power of two."""

from typing import Any

import numpy as np
import pytest
import torch

from bullet_graph.kernels.fp8 import FP8


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter round to FP8 as torch and the GPU do."""
    import triton.language as tl  # noqa: PLC0415 - published for Linux only
    from triton.runtime import interpreter  # noqa: PLC0415

    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target is not tl.float8e4nv:
            return convert(data, source, target, mode)
        kind = {tl.float32: np.float32, tl.float16: np.float16}[source]
        return torch.from_numpy(np.array(data).view(kind)).to(FP8).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)
