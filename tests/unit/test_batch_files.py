"""The files of a batch: what an input may be, and what an output folder holds after deaths and restarts."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli_runner import refused, run

from bullet_graph.errors import ConfigError, WorkloadError

pa = pytest.importorskip("pyarrow", reason="needs the extra `ray`: pip install 'bullet-graph[ray]'")
from pyarrow import parquet  # noqa: E402

from bullet_graph.ray.batch_files import CHAT, COMPLETIONS, OutputFolder, PartFile, read_input  # noqa: E402
from bullet_graph.serve.errors import ApiError, read_request  # noqa: E402
from bullet_graph.serve.protocol import ChatCompletionRequest, CompletionRequest  # noqa: E402

MESSAGES = [{"role": "user", "content": "a"}]
ENVELOPE = {"custom_id": "x", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "a", "max_tokens": 9}}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(custom_id: str, status: int = 200) -> dict[str, Any]:
    return {"custom_id": custom_id, "response": {"status_code": status}}


def test_rows_of_both_forms_become_requests_with_defaults(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.jsonl", ENVELOPE, {"prompt": [1]}, {"messages": MESSAGES, "max_tokens": 3}))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as some editors begin files
    found = read_input(str(path), {"max_tokens": 5})
    assert found.custom_ids == ["x", "row-2", "row-3"]
    assert [json.loads(line) for line in found.lines] == [
        {name: ENVELOPE[name] for name in ("method", "url", "body")},
        {"method": "POST", "url": COMPLETIONS, "body": {"max_tokens": 5, "prompt": [1]}},
        {"method": "POST", "url": CHAT, "body": {"max_tokens": 3, "messages": MESSAGES}},
    ]


@pytest.mark.parametrize("odd", [{"max_tokens": -(10**21)}, {"n": -(10**21)}, {"n": 10**21}], ids=str)
def test_numbers_that_no_request_may_have_are_for_their_row_to_refuse(tmp_path: Path, odd: dict[str, int]) -> None:
    found = read_input(write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"} | odd))
    assert json.loads(found.lines[1])["body"] == {"prompt": "b"} | odd
    assert 0 <= found.output_tokens[1] < 2**31


def test_bytes_of_parquet_are_texts_or_an_error_of_their_row(tmp_path: Path) -> None:
    column = pa.array([b"a", b"\xff\xd8"])
    messages = pa.array([[{"role": "user", "content": text}] for text in column.to_pylist()])
    as_text = pa.Array.from_buffers(pa.string(), 2, column.buffers())
    for prompts in ({"prompt": column}, {"prompt": as_text}, {"messages": messages}):
        (name,) = prompts
        parquet.write_table(pa.table(prompts), tmp_path / "a.parquet")
        good, bad = (json.loads(line) for line in read_input(str(tmp_path / "a.parquet")).lines)
        assert good["body"] == {name: MESSAGES if name == "messages" else "a"}
        with pytest.raises(ApiError, match=f"`{name}.*can't decode"):
            read_request(ChatCompletionRequest if name == "messages" else CompletionRequest, bad["body"])


def test_a_default_limit_is_left_out_beside_the_limit_by_its_other_name(tmp_path: Path) -> None:
    names = ("max_tokens", "max_completion_tokens")
    path = write(tmp_path / "a.jsonl", *({"messages": MESSAGES} | {name: 3} for name in names), {"messages": MESSAGES})
    for default in names:
        bodies = [json.loads(line)["body"] for line in read_input(path, {default: 7}).lines]
        limits = [{name: body[name] for name in names if name in body} for body in bodies]
        assert limits == [{"max_tokens": 3}, {"max_completion_tokens": 3}, {default: 7}]


def test_the_longest_outputs_come_first(tmp_path: Path) -> None:
    bodies = [
        {"prompt": "a", "max_tokens": 20},
        {"prompt": "a"},
        {"prompt": "a", "max_tokens": 20, "n": 3},
        {"messages": MESSAGES},
        {"prompt": ["a", "b"], "max_tokens": 20},
        {"prompt": "longer", "max_tokens": 20},
        {"prompt": "a", "max_tokens": "wrong"},
    ]
    rows = read_input(write(tmp_path / "a.jsonl", *bodies))
    table = rows.longest_first(set(rows.custom_ids))
    assert [int(custom_id[4:]) for custom_id in table["custom_id"].to_pylist()] == [4, 3, 5, 6, 1, 7, 2]
    assert rows.longest_first({"row-1", "row-3"})["custom_id"].to_pylist() == ["row-3", "row-1"]


def test_parquet_compressed_lines_folders_and_uris_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [ENVELOPE, ENVELOPE | {"custom_id": "y", "url": CHAT, "body": {"messages": MESSAGES}}]
    plain = read_input(write(tmp_path / "a.jsonl", *rows))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "structs.parquet")
    texts = [each | {"body": json.dumps(each["body"])} for each in rows]
    parquet.write_table(pa.Table.from_pylist(texts), tmp_path / "texts.parquet")
    for name in ("a.jsonl.gz", "texts.parquet"):
        assert read_input(str(tmp_path / name)).digest == plain.digest
    structs = read_input(f"file://{tmp_path}/structs.parquet")
    assert [json.loads(line) for line in structs.lines] == [json.loads(line) for line in plain.lines]
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "2.jsonl", rows[1])
    write(folder / "1.jsonl", rows[0])
    assert read_input(str(folder)).custom_ids == ["x", "y"]


def test_a_folder_is_read_whole_or_refused(tmp_path: Path) -> None:
    endings = ("jsonl", "jsonl.bz2", "jsonl.lz4", "jsonl.zst", "json.gz", "ndjson", "ndjson.zst")
    for ending in endings:
        with pa.output_stream(str(tmp_path / f"a.{ending}"), compression="detect") as file:
            file.write(json.dumps({"prompt": "a", "custom_id": ending}).encode())
        assert read_input(str(tmp_path / f"a.{ending}")).custom_ids == [ending]
    (tmp_path / "of_a_day.json").mkdir()
    for beside in ("_SUCCESS", ".a.jsonl.crc", "of_a_day.json/_SUCCESS"):
        (tmp_path / beside).write_text("no row")
    assert set(read_input(str(tmp_path)).custom_ids) == set(endings)
    (tmp_path / "of_a_day.json" / "notes.txt").write_text("no row")
    with pytest.raises(WorkloadError, match=r"of_a_day\.json/notes\.txt: .* must end in \.jsonl, .*rename it"):
        read_input(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one row"),
        ("{\n", "line 1: a JSON object is required"),
        ("[1]\n", "line 1: a JSON object is required"),
        ('\n{"text": "a"}\n', "line 2: .* found text"),
        ('{"body": {}, "url": "/v1/completions"}\n', "custom_id, method not found"),
        ('{"prompt": "a", "custom_id": 3}\n', "custom_id must be a text"),
        ('{"prompt": "a", "custom_id": "row-2"}\n{"prompt": "b"}\n', "line 2: each custom_id .* 'row-2' in .*line 1"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line_before_ray_or_a_model_starts(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_input(str(path))
    monkeypatch.setattr("bullet_graph.cli.batch.require_extra", lambda *_, **__: None)
    monkeypatch.setitem(__import__("sys").modules, "bullet_graph.ray.job", None)
    command = ("batch", "--model", "tiny", "--output", str(tmp_path / "out"), "--input")
    assert str(path) in refused(run(*command, str(path)))
    assert "would be read as input" in refused(run(*command, str(tmp_path)))


def test_a_missing_file_and_a_store_that_does_not_answer_are_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="there is no such file"):
        read_input(str(tmp_path / "none.jsonl"))
    with pytest.raises(WorkloadError, match=r"s3://bucket/a\.jsonl.* cannot be read"):
        read_input("s3://bucket/a.jsonl?scheme=http&endpoint_override=127.0.0.1:1&region=x&access_key=a&secret_key=b")


def test_an_output_has_each_row_once_whatever_was_written_twice_or_torn(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with OutputFolder(path, {"input": "1"}) as folder:
        for rows in ([row("a"), row("b", 500)], [row("a", 500), row("b"), row("c", 400), row("d", 500)]):
            part = PartFile(path)
            for each in rows:
                part.append(each)
            part.sync()
        (path / "parts" / "torn.jsonl").write_text("garbage\n{}\n" + json.dumps(row("e")))
        folder.refresh()
        assert (folder.done, folder.written, folder.num_errors) == (set("abc"), set("abcd"), 2)
        (path / ".output.jsonl.77.tmp").write_text("what a process left that was killed while it finished")
        folder.finish(["d", "c", "b", "a", "e"])
        with pytest.raises(ConfigError, match="another batch writes there"), OutputFolder(path, {"input": "1"}):
            pass
    found = [json.loads(line) for line in (path / "output.jsonl").read_text().splitlines()]
    assert found == [row("d", 500), row("c", 400), row("b"), row("a")]
    assert not [*path.glob("parts/*"), *path.glob(".output*")]
    with OutputFolder(path, {"input": "1"}) as folder:
        assert folder.done == {"a", "b", "c"}
    for damaged, told in (("", "differs in input"), ("[]", "batch.json is damaged")):
        with (path / "batch.json").open("w" if damaged else "a") as file:
            file.write(damaged)
        with pytest.raises(ConfigError, match=told), OutputFolder(path, {"input": "2"}):
            pass


def test_a_row_that_the_disk_took_in_part_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with OutputFolder(tmp_path, {}) as folder:
        part = PartFile(tmp_path)
        part.append(row("a"))
        with monkeypatch.context() as full:
            write = os.write
            full.setattr(os, "write", lambda file, data: write(file, data[:9]))
            with pytest.raises(OSError, match="9 bytes were"):
                part.append(row("b"))
        part.append(row("c"))
        folder.refresh()
        assert folder.done == {"a", "c"}


def test_without_ray_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bullet_graph.cli.result_file.find_spec", lambda name: None if name == "ray" else object())
    message = refused(run("batch", "--input", "in.jsonl", "--output", str(tmp_path), "--model", "tiny"))
    assert "needs ray, not installed here: pip install 'bullet-graph[ray]'" in message
