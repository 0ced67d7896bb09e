"""Manifests: read as they were written, or refused."""

import dataclasses
import json
from contextlib import suppress
from typing import Any

import pytest
from caches import FINGERPRINT, PLAN
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint, digest
from bullet_graph.captures.manifest import MAX_ARTIFACT_BYTES, Artifact, Manifest
from bullet_graph.captures.manifest_file import manifest_bytes, parse_manifest
from bullet_graph.errors import CacheError

ARTIFACT = Artifact("gemm", ArtifactKind.TRITON, "triton/gemm.cubin", 10, "a" * 64, 2.5)
MANIFEST = Manifest(
    fingerprint=FINGERPRINT,
    plan=PLAN,
    artifacts=(ARTIFACT, dataclasses.replace(ARTIFACT, name="other", path="triton/other.cubin")),
    self_check=None,
    created_utc="2026-01-02T03:04:05+00:00",
    provenance={"host": "h"},
)

WORDS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
JSON_OBJECTS = st.dictionaries(st.text(), JSON_VALUES, max_size=3)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(st.lists(WORDS, unique=True, max_size=4))
    artifacts = tuple(
        Artifact(
            name,
            draw(st.sampled_from(ArtifactKind)),
            # A folder for each, so that no path is the folder of another.
            f"{index}/" + "/".join(draw(st.lists(WORDS, min_size=1, max_size=3))),
            draw(st.integers(0, MAX_ARTIFACT_BYTES)),
            draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
            draw(st.floats(0, 1e6)),
        )
        for index, name in enumerate(names)
    )
    created = draw(st.datetimes()).isoformat(timespec="seconds") + "+00:00"
    return Manifest(
        fingerprint=Fingerprint.of(draw(st.dictionaries(st.sampled_from(["gpu", "torch", "zz"]), WORDS))),
        plan=draw(JSON_OBJECTS),
        artifacts=artifacts,
        self_check=draw(st.none() | JSON_OBJECTS),
        created_utc=created,
        provenance=draw(JSON_OBJECTS),
    )


@given(manifests())
def test_it_comes_back_as_it_was(manifest: Manifest) -> None:
    assert parse_manifest(manifest_bytes(manifest), "m") == manifest


@given(st.data())
def test_a_changed_byte_is_refused_or_changes_nothing(data: st.DataObject) -> None:
    text = bytearray(manifest_bytes(MANIFEST))
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    with suppress(CacheError):
        assert parse_manifest(bytes(text), "m") == MANIFEST


@given(st.integers(0, len(manifest_bytes(MANIFEST)) - 3))
def test_a_truncated_one_is_refused(length: int) -> None:
    with pytest.raises(CacheError, match="truncated"):
        parse_manifest(manifest_bytes(MANIFEST)[:length], "m")


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(CacheError):
        parse_manifest(data, "m")


def content() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(manifest_bytes(MANIFEST))
    return parsed


def encode(content: dict[str, Any]) -> bytes:
    """With the checksum that belongs to it, so that something else has to refuse it."""
    content.pop("checksum", None)
    return json.dumps({**content, "checksum": digest(content)}).encode()


def refusal(content: dict[str, Any]) -> str:
    with pytest.raises(CacheError) as caught:
        parse_manifest(encode(content), "here/manifest.json")
    assert "here/manifest.json" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", [name for name in json.loads(manifest_bytes(MANIFEST)) if name != "checksum"]
)
def test_nothing_may_be_missing(name: str) -> None:
    values = content()
    del values[name]
    assert name in refusal(values)


def test_nothing_may_be_unknown() -> None:
    assert "unknown entries: 'extra'" in refusal({**content(), "extra": 1})
    values = content()
    values["artifacts"][0]["mode"] = 0o4755
    assert "mode" in refusal(values)
    del values["artifacts"][0]["mode"], values["artifacts"][0]["kind"]
    assert "kind" in refusal(values)


def test_another_version_is_refused() -> None:
    assert "version 1 of the format is required, found 2: use the bullet-graph" in refusal(
        {**content(), "version": 2}
    )
    assert "found 0;" in refusal({**content(), "version": 0})
    assert "found True;" in refusal({**content(), "version": True})
    assert "something else" in refusal({**content(), "format": "tar"})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/etc/passwd", "absolute"),
        ("../x", "'..'"),
        ("a/../../x", "'..'"),
        ("..", "'..'"),
        ("a//b", "simplest form"),
        ("./a", "simplest form"),
        ("a/", "simplest form"),
        ("", "simplest form"),
        ("a\\b", "simplest form"),
        ("a\nb", "simplest form"),
        ("a\0b", "simplest form"),
        ("\ud800", "simplest form"),
        ("a" * 256, "too long"),
        ("/".join(["a" * 200] * 6), "too long"),
    ],
)
def test_paths_that_could_leave_the_store_are_refused(path: str, message: str) -> None:
    values = content()
    values["artifacts"][0]["path"] = path
    assert message in refusal(values)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("name", "", "printable"),
        ("name", 5, "type str"),
        ("name", "other", "two artifacts have the name 'other'"),
        ("path", "triton/other.cubin", "two artifacts have the path"),
        ("path", "triton", "both a file and a folder"),
        ("path", "triton/other.cubin/x", "both a file and a folder"),
        ("kind", "exe", "one of torch_compile"),
        ("num_bytes", -1, "num_bytes"),
        ("num_bytes", True, "type int"),
        ("num_bytes", 1.0, "type int"),
        ("num_bytes", MAX_ARTIFACT_BYTES + 1, "num_bytes"),
        ("sha256", "A" * 64, "64 hexadecimal"),
        ("sha256", "a" * 63, "64 hexadecimal"),
        ("build_seconds", -1.0, "at least 0"),
        ("build_seconds", "1", "type float"),
        ("build_seconds", 10**400, "too large"),
    ],
)
def test_wrong_values_of_an_artifact(entry: str, value: object, message: str) -> None:
    values = content()
    values["artifacts"][0][entry] = value
    assert message in refusal(values)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("plan", [], "plan must be of type dict"),
        ("provenance", None, "provenance must be of type dict"),
        ("self_check", 1, "self_check must be of type dict"),
        ("artifacts", {}, "artifacts must be of type list"),
        ("artifacts", [1], "artifacts[0] must be of type dict"),
        ("fingerprint", {"gpu": 1}, "fingerprint.gpu must be of type str"),
        ("fingerprint", {"Gpu": "x"}, "lower-case"),
        ("fingerprint", [], "type dict"),
        ("created_utc", "yesterday", "ISO 8601"),
        ("created_utc", "2026-01-02T03:04:05", "ISO 8601"),
        ("created_utc", "2026-01-02T03:04:05+01:00", "ISO 8601"),
    ],
)
def test_wrong_values(entry: str, value: object, message: str) -> None:
    assert message in refusal({**content(), entry: value})


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a": NaN}', b'{"a": 1e999}', b'{"a": 1, "a": 2}', b"\xff", b"1" * 5000]
)
def test_json_that_is_none_of_ours(text: bytes) -> None:
    with pytest.raises(CacheError):
        parse_manifest(text, "m")


def test_values_that_are_no_plain_json_are_refused_when_made() -> None:
    for plan in ({"a": (1, 2)}, {1: 2}, {"a": float("nan")}, {"a": object()}):
        with pytest.raises(CacheError, match="plain JSON"):
            dataclasses.replace(MANIFEST, plan=plan)


def test_what_it_sums_up() -> None:
    assert MANIFEST.num_bytes == 20
    assert MANIFEST.build_seconds({ArtifactKind.TRITON}) == 5.0
    assert MANIFEST.build_seconds({ArtifactKind.FLASHINFER}) == 0.0
