"""Fingerprints: what is compared, and which parts of a cache a difference makes stale."""

import dataclasses
import os

import pytest
import torch
from caches import FINGERPRINT, PLAN
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import cpp_builder

from bullet_graph.captures.fingerprint import (
    ALL_KINDS,
    DEPENDS_ON,
    ArtifactKind,
    Fingerprint,
    entry_id,
    kinds_depending_on,
    plan_differences,
    stale_kinds,
)
from bullet_graph.errors import CacheError, DeviceError
from bullet_graph.graphs.capture_plan import default_plan
from bullet_graph.models.presets import PRESETS
from bullet_graph.runtime import fingerprint as runtime_fingerprint
from bullet_graph.runtime.fingerprint import (
    GRAPH_SOURCES,
    KERNEL_SOURCES,
    machine_components,
    model_components,
    on_this_machine,
    plan_mapping,
    source_digest,
)

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True).filter(lambda name: name != "plan")
VALUES = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)


def changed(**components: str) -> Fingerprint:
    return Fingerprint.of({**FINGERPRINT.values, **components})


@given(st.dictionaries(NAMES, VALUES))
def test_order_does_not_matter(components: dict[str, str]) -> None:
    other = Fingerprint.of(dict(reversed(components.items())))
    assert Fingerprint.of(components) == other
    assert Fingerprint.of(components).short_id == other.short_id
    assert Fingerprint.of(components).differences(other) == ()


@given(st.dictionaries(NAMES, VALUES), st.dictionaries(NAMES, VALUES))
def test_the_id_differs_just_where_a_component_does(first: dict[str, str], second: dict[str, str]) -> None:
    one, two = Fingerprint.of(first), Fingerprint.of(second)
    assert (one.short_id == two.short_id) == (not one.differences(two))


def test_a_difference_names_both_sides() -> None:
    (difference,) = FINGERPRINT.differences(changed(flashinfer="0.7.0"))
    assert (difference.component, difference.cached, difference.here) == ("flashinfer", "0.6.12", "0.7.0")


def test_a_component_that_one_side_lacks_differs() -> None:
    lacking = Fingerprint.of({k: v for k, v in FINGERPRINT.values.items() if k != "driver"})
    (difference,) = lacking.differences(FINGERPRINT)
    assert (difference.cached, difference.here) == (None, "580.159.04")


@pytest.mark.parametrize(
    ("component", "stale", "kept"),
    [
        ("code_kernels", {ArtifactKind.TORCH_COMPILE, ArtifactKind.TRITON}, {ArtifactKind.PERF_TABLE}),
        ("code_graphs", {ArtifactKind.CAPTURE}, {ArtifactKind.TORCH_COMPILE, ArtifactKind.TRITON}),
        ("model", {ArtifactKind.TRITON, ArtifactKind.PERF_TABLE}, {ArtifactKind.FLASHINFER}),
        ("head_dim", {ArtifactKind.FLASHINFER}, {ArtifactKind.TRITON}),
        ("host_isa", {ArtifactKind.TORCH_COMPILE}, {ArtifactKind.TRITON, ArtifactKind.CAPTURE}),
        ("driver", {ArtifactKind.MASK_OFFSET, ArtifactKind.TUNING}, {ArtifactKind.FLASHINFER}),
        ("flashinfer", {ArtifactKind.FLASHINFER, ArtifactKind.PERF_TABLE}, {ArtifactKind.TRITON}),
        ("from_a_later_version", set(ALL_KINDS), set()),
    ],
)
def test_only_the_parts_that_depend_on_it_go_stale(
    component: str, stale: set[ArtifactKind], kept: set[ArtifactKind]
) -> None:
    found = stale_kinds(FINGERPRINT.differences(changed(**{component: "other"})))
    assert stale <= found
    assert not kept & found


def test_a_plan_leaves_what_is_measured_and_flashinfer() -> None:
    differences = plan_differences(PLAN, {**PLAN, "batch_sizes": [1]})
    assert [(d.component, d.cached, d.here) for d in differences] == [
        ("plan.batch_sizes", "[1, 2, 4]", "[1]")
    ]
    kept = set(ALL_KINDS) - stale_kinds(differences)
    assert kept == {ArtifactKind.FLASHINFER, ArtifactKind.PERF_TABLE, ArtifactKind.MASK_OFFSET}
    assert plan_differences(PLAN, dict(reversed(PLAN.items()))) == ()


def test_every_kind_depends_on_the_device() -> None:
    assert kinds_depending_on("device") == ALL_KINDS
    assert set(DEPENDS_ON) == set(ALL_KINDS)


def test_the_entry_follows_fingerprint_and_plan() -> None:
    name = entry_id(FINGERPRINT, PLAN)
    assert name == entry_id(FINGERPRINT, dict(reversed(PLAN.items())))
    assert len({name, entry_id(changed(gpu="other"), PLAN), entry_id(FINGERPRINT, {})}) == 3


@pytest.mark.parametrize(
    "components",
    [{"Bad": "x"}, {"": "x"}, {"plan": "x"}, {"a": ""}, {"a": "\x1b[2J"}, {"a": "x" * 501}, {"a": "\ud800"}],
)
def test_what_cannot_be_compared_or_shown_is_refused(components: dict[str, str]) -> None:
    with pytest.raises(CacheError):
        Fingerprint.of(components)


def test_components_twice_or_out_of_order_are_refused() -> None:
    for components in ((("torch", "1"), ("torch", "2")), (("torch", "1"), ("gpu", "2"))):
        with pytest.raises(CacheError, match="order"):
            Fingerprint(components)


# This machine's side


def test_this_machine_without_a_gpu() -> None:
    components = machine_components("cpu")
    assert components["torch"] == torch.__version__
    assert components["device"] == "cpu"
    assert {"host_cpu", "cpu_threads", "cxx_compiler"} <= components.keys()
    assert "gpu" not in components
    known = {name for names in DEPENDS_ON.values() for name in names}
    assert components.keys() <= known


def test_without_a_compiler_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    assert machine_components("cpu")["cxx_compiler"] == "none"


def test_the_compiler_is_the_one_that_inductor_takes() -> None:
    found, _, version = machine_components("cpu")["cxx_compiler"].partition(": ")
    assert found == os.path.basename(cpp_builder.get_cpp_compiler())
    assert version


def test_this_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "NVIDIA H200"
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(runtime_fingerprint, "nvml_driver_version", lambda: "580.1")
    components = machine_components("cuda")
    assert (components["gpu"], components["num_sms"], components["driver"]) == ("NVIDIA H200", "132", "580.1")
    assert "host_cpu" not in components
    assert components["host_isa"] == torch.backends.cpu.get_cpu_capability()
    known = {name for names in DEPENDS_ON.values() for name in names}
    assert components.keys() <= known
    monkeypatch.setattr(runtime_fingerprint, "nvml_driver_version", lambda: None)
    with pytest.raises(DeviceError, match="NVML"):
        machine_components("cuda")


def test_a_cache_of_a_gpu_does_not_fit_a_machine_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = on_this_machine(FINGERPRINT).values
    assert here["device"] == "cpu"
    assert here["model"] == FINGERPRINT.values["model"]


def test_the_model_is_its_shape_alone() -> None:
    tiny = PRESETS["tiny"]
    components = model_components(tiny, torch.bfloat16)
    assert components["dtype"] == "bfloat16"
    assert components["head_dim"] == "64"
    same = dataclasses.replace(tiny, eos_token_ids=(1,), dtype=torch.float16)
    assert model_components(same, torch.bfloat16) == components
    other = dataclasses.replace(tiny, rope_theta=5.0)
    assert model_components(other, torch.bfloat16)["model"] != components["model"]


def test_sources_are_there_and_change_the_digest(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pattern in (*KERNEL_SOURCES, *GRAPH_SOURCES):
        assert list(runtime_fingerprint._PACKAGE_FOLDER.glob(pattern)), pattern
    for name in runtime_fingerprint._WITHOUT_KERNELS:
        assert (runtime_fingerprint._PACKAGE_FOLDER / name).is_file()
    monkeypatch.setattr(runtime_fingerprint, "_PACKAGE_FOLDER", tmp_path)
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.py").write_text("2")
    before = source_digest(["*.py"])
    assert source_digest(["*.py", "a.py"]) == before
    assert source_digest(["*.py"], without=frozenset({"b.py"})) == source_digest(["a.py"]) != before
    (tmp_path / "b.py").write_text("3")
    assert source_digest(["*.py"]) != before


def test_a_plan_is_plain_json() -> None:
    plan = default_plan(
        model="tiny",
        dtype="bfloat16",
        num_sms=132,
        max_num_seqs=4,
        max_rows=64,
        shape=PRESETS["tiny"],
        decode_sms=(32,),
    )
    mapping = plan_mapping(plan)
    assert mapping["model"] == "tiny"
    assert mapping["decode"][1]["batch_sizes"] == [1, 2, 4]
