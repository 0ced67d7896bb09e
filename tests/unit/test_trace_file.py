"""Reading decision traces, and refusing what is none."""

import json
from pathlib import Path

import pytest
from traces import HEADER, RUN, Record, decision, launch, request, retire, write

from bullet_graph.errors import TraceError
from bullet_graph.perf.explain import summarize_trace
from bullet_graph.perf.trace import Trace, read_trace


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write(tmp_path / "run.jsonl", RUN)


def read(tmp_path: Path, *records: Record) -> Trace:
    return read_trace(write(tmp_path / "trace.jsonl", [*RUN, *records]))


def test_a_last_line_cut_short_is_left_out(tmp_path: Path, run_file: Path) -> None:
    for cut in (2, 10):
        content = run_file.read_bytes()[:-cut]
        (tmp_path / "cut.jsonl").write_bytes(content)
        trace = read_trace(tmp_path / "cut.jsonl")
        assert trace.notes == (
            "line 13, the last, was cut short and is left out",
            "launches that were never seen to end, and are left out: 1",
        )
        assert summarize_trace(trace).notes == trace.notes
        assert summarize_trace(trace).num_launches == 3


def test_a_last_line_that_lacks_its_end_alone_is_whole(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "cut.jsonl").write_bytes(run_file.read_bytes()[:-1])
    assert read_trace(tmp_path / "cut.jsonl") == read_trace(run_file)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no\.jsonl: cannot be read \(No such file"):
        read_trace(tmp_path / "no.jsonl")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot be read \(Is a directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"timestamp,tokens\n1,2\n", "line 1: must hold one JSON object"),
        (b"\x00\xff\xfe", "line 1: must hold one JSON object"),
        (b"[" * 100_000, "line 1: must hold one JSON object"),
        (b'{"timestamp": 1}\n', "line 1: does not begin a decision trace"),
        (b"[]\n", "line 1: does not begin a decision trace"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match=rf"t\.jsonl.*{message}"):
        read_trace(tmp_path / "t.jsonl")


def test_another_version(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [HEADER | {"format_version": 1, "version": "9.9"}])
    with pytest.raises(TraceError, match=r"line 1: format version 2 is required, but the trace has 1.*9\.9"):
        read_trace(path)


@pytest.mark.parametrize("line", [b'{"type": "retire", "tick\n', b"\n", b"\xff\n", b'{"a": NaN}\n'])
def test_a_broken_line_in_the_middle(tmp_path: Path, line: bytes) -> None:
    written = [json.dumps(record).encode() + b"\n" for record in RUN]
    (tmp_path / "t.jsonl").write_bytes(b"".join([*written[:5], line, *written[5:]]))
    with pytest.raises(TraceError, match=r"t\.jsonl, line 6: must hold one JSON object"):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"type": "guess"}, "must have a type among .* but has 'guess'"),
        ({"type": ["launch"]}, "must have a type among"),
        ({}, "must have a type among .* but has None"),
        (retire(9, 101.0, 1.0), "ticket 9 ends, but is not under way"),
        (decision(0, 101.0, "solo"), "decision 0 is there twice"),
        (launch(9, "decode", 101.0, "solo", 7), "decision 7 is on no line before"),
        (launch(9, "decode", 101.0, "solo", 0) | {"lane": "fast"}, 'lane must be one of .*"fast"'),
        (launch(9, "decode", 101.0, "solo", 0) | {"layers": 1.5}, "layers must be an integer, but is 1.5"),
        (launch(9, "decode", 101.0, "solo", 0) | {"layers": True}, "layers must be an integer, but is true"),
        (launch(9, "decode", 101.0, "solo", 0) | {"layers": 10**400}, "layers must be an integer"),
        (
            launch(9, "decode", 101.0, "solo", 0) | {"predicted_ms": "1"},
            'predicted_ms must be a number or null, but is "1"',
        ),
        (launch(9, "decode", 101.0, "solo", 0) | {"time_s": None}, "time_s must be a number, but is null"),
        (decision(9, 101.0, "solo", options=[1]), "options must be a list, each of it an object"),
        (request("r", []) | {"token_us": [1, 2.5]}, "token_us must be a list, each of it an integer"),
        (request("r", []) | {"request_id": 5}, "request_id must be a text, but is 5"),
    ],
)
def test_broken_records(tmp_path: Path, record: Record, message: str) -> None:
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 14: {message}"):
        read(tmp_path, record)


def test_a_ticket_that_is_launched_twice(tmp_path: Path) -> None:
    step = launch(9, "decode", 101.0, "solo", 0)
    with pytest.raises(TraceError, match="line 15: ticket 9 is under way already"):
        read(tmp_path, step, step)


def test_a_negative_time_on_the_device(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 15: device_ms must not be negative, but is -1"):
        read(tmp_path, launch(9, "decode", 101.0, "solo", 0), retire(9, 102.0, -1.0))


def test_tickets_may_come_again(tmp_path: Path) -> None:
    again = (launch(1, "decode", 101.0, "solo", 0), retire(1, 101.1, 10.0))
    assert [step.device_ms for step in read(tmp_path, *again).launches] == [100.0, 100.0, 200.0, 50.0, 10.0]
