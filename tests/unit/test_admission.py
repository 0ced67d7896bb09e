"""What admission makes of a prompt and its settings: seeds of samples."""

from dataclasses import replace

import pytest

from bullet_graph.engine.admission import Admission
from bullet_graph.engine.output import OutputKind
from bullet_graph.engine.request import Request
from bullet_graph.models.presets import PRESETS
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS

TINY = replace(PRESETS["tiny"], eos_token_ids=(4,))


def admitted(params: SamplingParams) -> Request:
    admission = Admission(TINY, None, max_model_len=64, seed=0)
    return admission.request("a", [5, 6], params, output_kind=OutputKind.CUMULATIVE, arrival_s=0.0, slo=NO_TARGETS)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(7, [7, 8, 9]), (2**62, [2**62 + i for i in range(3)]), (2**63 - 2, [2**63 - 2, 2**63 - 1, 0])],
)
def test_each_sample_has_the_next_seed(seed: int, expected: list[int]) -> None:
    samples = admitted(SamplingParams(seed=seed, n=3)).samples
    assert [sample.sequence.seed for sample in samples] == expected
