"""What an engine must leave alone in the program that embeds it."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from engines import GREEDY, Model, make_engine

PROMPT = [5, 17, 300, 8]

MANNERS = """
    import logging, multiprocessing, os, random, signal, sys, threading, warnings

    import numpy, psutil, torch

    import bullet_graph
    from bullet_graph import Engine, SamplingParams

    def state():
        return {
            "signals": {s: signal.getsignal(s) for s in signal.valid_signals() if s not in (9, 19)},
            "root log handlers": list(logging.root.handlers),
            "root log level": logging.root.level,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
            "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul precision": torch.get_float32_matmul_precision(),
            "torch seed": torch.get_rng_state().tolist(),
            "random seed": random.getstate(),
            "numpy seed": [str(part) for part in numpy.random.get_state()],
            "numpy errors": numpy.geterr(),
            "warnings": list(warnings.filters),
            "excepthooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
            "start method": multiprocessing.get_start_method(allow_none=True),
            "children": psutil.Process().children(recursive=True),
            "running threads": [thread.name for thread in threading.enumerate()],
            "output": (sys.stdout, sys.stderr),
            "recursion": sys.getrecursionlimit(),
        }

    before = state()
    with Engine(sys.argv[1], device="cpu", max_model_len=64, max_num_seqs=4) as engine:
        engine.generate([[1, 2, 3], [4]], SamplingParams(seed=1), use_tqdm=False)
        during = state()
    after = state()
    print({
        name: (before[name], during[name], after[name])
        for name in before
        if not before[name] == during[name] == after[name]
    })
"""


@pytest.mark.parametrize("what", ["preset", "folder"])
def test_an_engine_changes_nothing_of_the_program_around_it(model: Model, what: str) -> None:
    name = "tiny" if what == "preset" else str(model.folder)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MANNERS), name],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "{}"
    assert done.stderr == ""


def test_nothing_is_printed_unless_asked_for(model: Model, capfd: pytest.CaptureFixture[str]) -> None:
    with make_engine(model.folder) as engine:
        engine.generate([PROMPT], GREEDY, use_tqdm=False)
        assert capfd.readouterr() == ("", "")
        engine.generate([PROMPT, PROMPT, []], GREEDY)
        out, err = capfd.readouterr()
    assert out == ""
    assert "3/3" in err
