"""The C extension over a fake libcuda; `make sanitize` runs this file under AddressSanitizer and UBSan."""

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from fakes.fake_streams import OBJECT_BYTES, FakeLibcuda, object_address, object_bytes, point_to
from hypothesis import example, given
from hypothesis import strategies as st

from bullet_graph import _smctrl

U64_MAX = 2**64 - 1
LAST_OFFSET = OBJECT_BYTES - 20

mask_access = pytest.mark.parametrize(
    "access", [partial(_smctrl.set_mask, disable_low=0, disable_high=0), _smctrl.get_mask], ids=["set", "get"]
)
NO_INTEGERS = (("5", TypeError), (None, TypeError), (-1, OverflowError), (2**64, OverflowError))


@contextmanager
def registered(libcuda: FakeLibcuda, fill: int = 0) -> Iterator[int]:
    stream = libcuda.stream(fill=fill)
    _smctrl.register_stream(stream)
    yield stream
    _smctrl.forget_stream(stream)


# Reading and writing


@pytest.mark.parametrize("offset", [0, 0x51C, LAST_OFFSET])
def test_a_mask_is_written_as_the_driver_reads_it(libcuda: FakeLibcuda, offset: int) -> None:
    with registered(libcuda, fill=0xAB) as stream:
        _smctrl.set_mask(stream, offset, 0x1111_2222_3333_4444, 0x5555_6666_7777_8888)
    written = struct.pack("<5I", 1, 0x3333_4444, 0x1111_2222, 0x7777_8888, 0x5555_6666)
    rest = b"\xab" * (OBJECT_BYTES - offset - len(written))
    assert object_bytes(stream) == b"\xab" * offset + written + rest


@example(low=U64_MAX, high=U64_MAX, enabled=1)
@given(low=st.integers(0, U64_MAX), high=st.integers(0, U64_MAX), enabled=st.integers(0, 2**32 - 1))
def test_a_mask_is_read_back(libcuda: FakeLibcuda, low: int, high: int, enabled: int) -> None:
    with registered(libcuda) as stream:
        _smctrl.set_mask(stream=stream, offset=0x51C, disable_low=low, disable_high=high, enabled=enabled)
        assert _smctrl.get_mask(stream, 0x51C) == _smctrl.get_mask(stream=stream, offset=0x51C) == (enabled, low, high)


# Refused arguments: nothing may be written


@mask_access
@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        *(
            ("offset", offset, ValueError, f"multiple of 4 and at most {LAST_OFFSET}, got {offset}")
            for offset in (LAST_OFFSET + 4, LAST_OFFSET - 2, U64_MAX - 3)
        ),
        *(("stream", n, ValueError, f"a registered CUstream, got {n}") for n in (0, 1, 2, 8)),
        *((name, *wrong, None) for name in ("stream", "offset") for wrong in NO_INTEGERS),
    ],
)
def test_wrong_arguments(
    libcuda: FakeLibcuda,
    access: Callable[..., object],
    name: str,
    value: object,
    error: type[Exception],
    message: str | None,
) -> None:
    with registered(libcuda, fill=0xAB) as stream, pytest.raises(error, match=message):
        access(**({"stream": stream, "offset": 0x51C} | {name: value}))
    assert object_bytes(stream) == b"\xab" * OBJECT_BYTES


def test_enabled_is_one_word(libcuda: FakeLibcuda) -> None:
    with registered(libcuda) as stream, pytest.raises(ValueError, match="enabled must fit 32 bits, got 4294967296"):
        _smctrl.set_mask(stream, 0x51C, 0, 0, 2**32)


@mask_access
@pytest.mark.parametrize("shift", [None, 1, 2])
def test_a_handle_without_an_object(libcuda: FakeLibcuda, access: Callable[..., object], shift: int | None) -> None:
    with registered(libcuda) as stream:
        point_to(stream, 0 if shift is None else object_address(stream) + shift)
        with pytest.raises(ValueError, match=f"stream {stream} does not point to a driver object"):
            access(stream, 0x51C)


# Handles


@mask_access
def test_only_registered_streams_are_followed(libcuda: FakeLibcuda, access: Callable[..., object]) -> None:
    stream = libcuda.stream(fill=0xAB)
    refusal = pytest.raises(ValueError, match=f"a registered CUstream, got {stream}")
    with refusal:
        access(stream, 0x51C)
    _smctrl.register_stream(stream)
    _smctrl.register_stream(stream)
    access(stream, 0x51C)
    _smctrl.forget_stream(stream)
    with refusal:
        access(stream, 0x51C)
    _smctrl.forget_stream(stream)


def test_a_made_up_handle_ends_no_process() -> None:
    code = "from bullet_graph import _smctrl\ntry: _smctrl.get_mask(8, 0)\nexcept ValueError: print('refused')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


@pytest.mark.parametrize("handle", [0, 1, 2, 12])
def test_special_handles_cannot_be_registered(handle: int) -> None:
    with pytest.raises(ValueError, match=f"handle of a created CUstream, got {handle}"):
        _smctrl.register_stream(handle)


@pytest.mark.parametrize(("value", "error"), NO_INTEGERS)
def test_handles_are_integers(value: object, error: type[Exception]) -> None:
    for change in (_smctrl.register_stream, _smctrl.forget_stream):
        with pytest.raises(error):
            change(value)  # type: ignore[arg-type]


def test_many_streams(libcuda: FakeLibcuda) -> None:
    streams = [libcuda.stream() for _ in range(65)]
    try:
        with pytest.raises(RuntimeError, match="at most 64 streams can be registered"):
            list(map(_smctrl.register_stream, streams))
        _smctrl.forget_stream(streams[0])
        _smctrl.register_stream(streams[64])
    finally:
        for stream in streams:
            _smctrl.forget_stream(stream)


# The library


def test_version_and_file_of_the_driver(libcuda: FakeLibcuda) -> None:
    libcuda.answer(13010)
    assert _smctrl.driver_version(libcuda.path) == 13010
    assert _smctrl.driver_version(libcuda=str(libcuda.path)) == 13010
    assert _smctrl.driver_path(libcuda.path) == str(libcuda.path)


def test_a_driver_that_answers_with_an_error(libcuda: FakeLibcuda) -> None:
    libcuda.answer(0, result=34)
    with pytest.raises(RuntimeError, match="no driver: cuDriverGetVersion returned CUDA error 34"):
        _smctrl.driver_version(libcuda.path)


@pytest.mark.parametrize("ask", [_smctrl.driver_version, _smctrl.driver_path])
def test_no_driver(ask: Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"no driver: .*missing\.so"):
        ask(tmp_path / "missing.so")
    # A library, but not the driver's.
    with pytest.raises(OSError, match=r"no driver: .*cuDriverGetVersion"):
        ask(_smctrl.__file__)
    with pytest.raises(TypeError):
        ask(5)


def test_the_default_is_the_systems_driver() -> None:
    try:
        version = _smctrl.driver_version()
    except OSError as error:
        assert str(error).startswith("no driver: libcuda.so.1")  # noqa: PT017 - both outcomes are right
    else:
        assert version > 11000
        assert "libcuda.so" in _smctrl.driver_path()
