"""What an engine must leave alone in the program that embeds it."""

import copy
import pickle

import pytest
from engines import GREEDY, Model
from programs import printed_by

from bullet_graph import Engine

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

    for model in sys.argv[1:]:
        before = state()
        with Engine(model, device="cpu", max_model_len=64, max_num_seqs=4) as engine:
            engine.generate([[1, 2, 3], [4]], SamplingParams(seed=1), use_tqdm=False)
            during = state()
        after = state()
        print({
            name: (before[name], during[name], after[name])
            for name in before
            if not before[name] == during[name] == after[name]
        })
"""


def test_an_engine_changes_nothing_of_the_program_around_it(model: Model) -> None:
    assert printed_by(MANNERS, str(model.folder), "tiny").split() == ["{}", "{}"]


FORKED = """
    import asyncio, os, sys

    from bullet_graph import AsyncEngine, Engine, EngineDeadError, SamplingParams

    def in_a_fork(use):
        pid = os.fork()
        if pid == 0:
            try:
                use()
            except EngineDeadError as error:
                print("refused" if f"its fork {os.getpid()}" in str(error) else error, flush=True)
                os._exit(0)
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    async def first(generator):
        return await anext(generator)

    engine = Engine(sys.argv[1], device="cpu", max_model_len=64, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=4)
    before = engine.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert in_a_fork(lambda: engine.generate([[1, 2, 3]], params, use_tqdm=False)) == 0
    assert in_a_fork(lambda: (engine.shutdown(), engine.now())) == 0
    assert in_a_fork(lambda: engine.abort("x")) == 0
    assert engine.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids == before
    in_thread = AsyncEngine(engine)
    assert in_a_fork(lambda: asyncio.run(first(in_thread.generate([1, 2, 3], params)))) == 0
    assert in_a_fork(lambda: asyncio.run(in_thread.set_policy("serial"))) == 0
    assert in_a_fork(lambda: (in_thread.shutdown(), in_thread.engine.now())) == 0
    assert asyncio.run(first(in_thread.generate([1, 2, 3], params))).outputs[0].token_ids
    in_thread.shutdown()
"""


def test_a_fork_is_refused_and_leaves_the_engine_alone(model: Model) -> None:
    assert printed_by(FORKED, str(model.folder)) == "refused\n" * 6


FORKED_FIRST = """
    import os, sys, torch
    from bullet_graph import DeviceError, Engine

    torch.set_num_threads(2)
    torch.ones(600, 600) @ torch.ones(600, 600)  # its threads are not in a fork, which would wait for them for ever
    for settings in {}, {"cpu_threads": 1}:
        if (pid := os.fork()) == 0:
            try:
                with Engine(sys.argv[1], device="cpu", max_model_len=64, **settings) as engine:
                    engine.generate([[1, 2, 3]], use_tqdm=False)
                    torch.ones(600, 600) @ torch.ones(600, 600)
                print("served", torch.get_num_threads(), flush=True)
            except DeviceError as error:
                print("spawn" in str(error), "cpu_threads=1" in str(error), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
    print(torch.get_num_threads())
"""


def test_a_new_engine_in_a_fork_is_refused_unless_it_has_one_thread(model: Model) -> None:
    assert printed_by(FORKED_FIRST, str(model.folder)).splitlines() == ["True True", "served 1", "2"]


def test_an_engine_is_not_copied(engine: Engine) -> None:
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="an Engine cannot be pickled or copied"):
            attempt(engine)


def test_nothing_is_printed_unless_asked_for(capfd: pytest.CaptureFixture[str], engine: Engine) -> None:
    engine.generate([PROMPT], GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    engine.generate([PROMPT, PROMPT, []], GREEDY)
    out, err = capfd.readouterr()
    assert out == ""
    assert "3/3" in err
