"""What an engine tells of its start."""

import time

import pytest
from engines import GREEDY, make_engine, run_to_end

from bullet_graph.perf.start_report import StartClock


def test_a_clock_counts_from_its_making() -> None:
    before_s = time.perf_counter()
    clock = StartClock()
    clock.add("imports", before_s - 1, before_s)
    assert clock.report().ready_s is None
    with clock.phase("kernels"):
        pass
    with pytest.raises(KeyError), clock.phase("decode graphs"):
        raise KeyError
    clock.ready()
    report = clock.report()
    assert [phase.name for phase in report.phases] == ["imports", "kernels"], "a phase that failed is none"
    assert before_s <= report.began_s <= time.perf_counter()
    assert report.seconds["imports"] == pytest.approx(1)
    assert report.phases[0].end_s <= 0
    assert report.ready_s is not None
    assert 0 <= report.phases[1].start_s <= report.phases[1].end_s <= report.ready_s


def test_an_engine_tells_each_phase_and_its_first_token() -> None:
    with make_engine() as engine:
        started = engine.start_report
        assert [p.name for p in started.phases] == [
            *("imports", "device", "tokenizer", "device", "allocation", "weights")
        ]
        engine.add_request("a", [1, 2, 3], GREEDY)
        arrival_s = engine.now()
        metrics = run_to_end(engine)["a"][-1].metrics
        first = engine.start_report.phases[-1]
        engine.set_policy("serial")
        engine.generate([[1]], GREEDY, use_tqdm=False)
        assert engine.start_report.phases[-1] == first, "there is one first token"
    assert started.ready_s is not None
    assert first.name == "first token"
    assert first.start_s + started.began_s <= arrival_s
    assert first.end_s + started.began_s == pytest.approx(metrics.token_times_s[0])
    assert first.start_s >= started.ready_s
