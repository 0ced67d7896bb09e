"""What a server tells whoever runs it: counters, the access log, a dashboard, its paths, and its tokenizer."""

import json
import logging
import re
import socket
import threading
from importlib import resources
from typing import Any
from unittest.mock import Mock

import pytest
from checkpoints import BOS_TOKEN_ID
from engines import Gate, Model
from servers import MODEL, Served, as_http, serving

from bullet_graph.engine.core import EngineCore
from bullet_graph.serve.access_log import log_requests, logger

SERVER = {"max_model_len": 64}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TOKENS = ("prompt_tokens_total", "generation_tokens_total")


# ---- counters ----


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_counted_as_they_come(gate: Gate, stream: bool) -> None:
    with serving(max_model_len=64) as served:
        body = {"prompt": [1] * 7, "max_tokens": 40, "n": 2, "ignore_eos": True, "stream": stream}
        asking = threading.Thread(target=served.post, args=(COMPLETIONS,), kwargs=body)
        asking.start()
        try:
            while (counts := [served.metrics()[name] for name in TOKENS])[1] < 8:
                assert asking.is_alive()
            assert counts[0] == 7
            assert counts[1] <= 20
        finally:
            gate.open()
            asking.join(30)
        served.wait_until_idle()
        assert [served.metrics()[name] for name in TOKENS] == [7, 80]
        assert served.http.get("/live").json()["generation_tokens"] == 80


# ---- the log ----

LINE = re.compile(
    r"127\.0\.0\.1 (\S+) (\S+) (\d+) \d+\.\d ms prompt_tokens=(\d+) output_tokens=(\d+) request_id=(\w{32})"
)


class Log:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def take(self, number: int, level: int = logging.INFO) -> list[tuple[str, ...]]:
        """So many lines, once they are there: a line comes after its answer."""
        for _ in range(1000):
            records = (record for record in self._caplog.records if record.name == logger.name)
            lines = [record.getMessage() for record in records if record.levelno >= level]
            if len(lines) >= number:
                break
            threading.Event().wait(0.01)
        self._caplog.clear()
        found = [LINE.fullmatch(line) for line in lines]
        assert all(found), lines
        assert len(found) == number
        return [match.groups() for match in found if match]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.DEBUG, logger=logger.name)
    return Log(caplog)


def test_each_request_has_a_line(served: Served, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    names, add = list[str](), EngineCore.add
    monkeypatch.setattr(EngineCore, "add", lambda core, one: (names.append(one.request_id), add(core, one)))
    body = {"prompt": [[1] * 7, [2] * 3], "max_tokens": 5, "ignore_eos": True}
    for stream in (False, True):
        response = served.post(COMPLETIONS, **body, stream=stream)
        request_id = response.headers["x-request-id"]
        assert f'"id":"cmpl-{request_id}"' in response.text
        assert log.take(1) == [("POST", COMPLETIONS, "200", "10", "10", request_id)]
        # A decision trace has them.
        assert names[-2:] == [f"{request_id}-0", f"{request_id}-1"]
    for path, status in (("/v1/models?key=s3cret", 200), ("/a%0Ab", 404), (COMPLETIONS, 405)):
        request_id = served.http.get(path).headers["x-request-id"]
        assert log.take(1) == [("GET", path.partition("?")[0], str(status), "0", "0", request_id)]
    assert served.http.get("/health").is_success
    assert log.take(1, logging.DEBUG)[0][:3] == ("GET", "/health", "200")
    assert served.http.get("/health").is_success
    assert log.take(0) == []


def test_what_is_refused_before_it_is_read_is_logged(served: Served, log: Log) -> None:
    many = b"GET /live?key=s3cret HTTP/1.1\r\n" + b"A: b\r\n" * 200
    for sent, line in ((many, ["GET", "/live", "431"]), (b"no HTTP\r\n\r\n", ["-", "-", "400"])):
        with served.connect(sent) as connection:
            answer = connection.makefile("rb").read().decode()
        ((*found, _, _, request_id),) = log.take(1)
        assert (found, f"X-Request-Id: {request_id}\r\n" in answer) == (line, True)


@pytest.mark.usefixtures("gate")
def test_a_request_whose_client_left_is_logged(served: Served, log: Log) -> None:
    connection = served.connect(as_http({"prompt": [1] * 7, "max_tokens": 50, "ignore_eos": True}))
    while not served.server.gate.num_inside:
        pass
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    assert log.take(1)[0][:4] == ("POST", COMPLETIONS, "499", "7")


def test_the_command_writes_the_log_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    handlers, propagate = list(logger.handlers), logger.propagate
    try:
        log_requests()
        logger.info("%s", "a request")
        logger.debug("a poll")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ a request\n", capsys.readouterr().err)
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate


# ---- the dashboard ----


def test_the_dashboard_asks_for_metrics_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's alone need one: its energy is read from a probe."""
    monkeypatch.setattr("bullet_graph.serve.app.open_probe", lambda *_: Mock(total_energy_mj=lambda: 5_000))
    dashboard = json.loads((resources.files("bullet_graph.serve") / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"bullet_graph:\w+", query)}
    assert len(asked) > 15
    with serving(max_model_len=64) as served:
        served.complete(prompt=[1], max_tokens=3, slo={"ttft_ms": 1e6})
        text = served.http.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    there = set(kinds) | {f"{name}_bucket" for name, kind in kinds.items() if kind == "histogram"}
    assert asked <= there, asked - there
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


# ---- paths ----


def test_a_wrong_path_or_method_is_told_which_there_are(served: Served) -> None:
    described = set(served.http.get("/openapi.json").json()["paths"])
    for response, status in (
        (served.post("/chat/completions"), 404),
        (served.http.get(CHATS), 405),
        (served.http.delete("/v1/models"), 405),
    ):
        assert response.status_code == status
        message = response.json()["error"]["message"]
        assert re.match(r"(POST|GET|DELETE) /\S+ is not served here: ask for POST /v1/completions, ", message)
        assert described | {"/metrics", "/docs", "/"} <= set(re.split("[ ,;]+", message))
    assert served.http.get(CHATS).headers["allow"] == "POST"


def test_the_api_is_described_without_other_hosts(served: Served) -> None:
    page = served.http.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://", page.text)


# ---- the tokenizer ----


def test_texts_and_conversations_as_tokens(model: Model) -> None:
    messages = [{"role": "user", "content": "The sea"}]
    with serving(model.folder, max_model_len=64) as served:
        told = served.ask("/tokenize", prompt="The sea", model=MODEL, return_token_strs=True)
        ids = served.complete(prompt="The sea", max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
        assert ids[0] == BOS_TOKEN_ID
        tokenizer = served.engine.engine.tokenizer
        assert tokenizer is not None
        assert served.http.get("/v1/models").json()["data"][0]["max_model_len"] == 64
        assert told == {"count": len(ids), "max_model_len": 64, "tokens": ids, "token_strs": tokenizer.tokens(ids)}
        assert served.ask("/tokenize", prompt="The sea", add_special_tokens=False)["tokens"] == ids[1:]
        told = served.ask("/tokenize", messages=messages)
        chat = served.ask(CHATS, messages=messages, max_tokens=1, return_token_ids=True)
        assert told["tokens"] == chat["prompt_token_ids"]
        assert told["token_strs"] is None
        closed = served.ask("/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
        assert closed == told["tokens"][: len(closed)]
        assert len(closed) < len(told["tokens"])
        assert served.ask("/detokenize", tokens=ids)["prompt"] == tokenizer.decode(ids, False)
        assert served.ask("/detokenize", tokens=[])["prompt"] == ""


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "`prompt` or `messages` is required, and not both"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "`prompt` or `messages`"),
        ("/tokenize", {"prompt": "x" * 800}, "no text of more than 756 characters fits"),
        ("/tokenize", {"prompt": "x", "chat_template": "y"}, "`chat_template` is not supported"),
        ("/detokenize", {}, "`tokens` is required"),
        ("/detokenize", {"tokens": [-1]}, "`tokens.0`"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tools": 1}},
            "`chat_template_kwargs` must name",
        ),
        ("/detokenize", {"tokens": [1] * 65}, "`tokens` may be at most 64 here, found 65"),
        ("/detokenize", {"tokens": [5, 10**6]}, "`tokens` must be of the vocabulary of"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "'other' is not served here"),
    ],
)
def test_what_the_tokenizer_refuses(
    served: Served, path: str, body: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    response = served.post(path, **body)
    assert served.http.get("/health").is_success, "the connection is still open"
    assert "Exception" not in caplog.text
    assert response.status_code in (400, 404)
    error = response.json()["error"]
    assert message in error["message"]
    assert error["code"] or error["param"] in (*body, "tokens", "prompt")
