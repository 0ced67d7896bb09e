"""The C extension over a fake libcuda; `make sanitize` runs this file under AddressSanitizer and UBSan."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.fake_streams import (
    OBJECT_BYTES,
    FakeLibcuda,
    object_address,
    object_bytes,
    point_to,
)
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph import _smctrl

U64_MAX = 2**64 - 1
FIELD_BYTES = {64: 8, 128: 20}

field_access = pytest.mark.parametrize(
    "access",
    [
        pytest.param(lambda *field: _smctrl.set_mask(*field, 0, 0), id="set"),
        pytest.param(_smctrl.clear_mask, id="clear"),
        pytest.param(_smctrl.get_mask, id="get"),
    ],
)


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> FakeLibcuda:
    return FakeLibcuda(tmp_path_factory.mktemp("libcuda"))


# Reading and writing


@pytest.mark.parametrize("offset", [0, 0x51C, OBJECT_BYTES - 20])
def test_the_128_bit_struct_is_written_as_the_driver_reads_it(libcuda: FakeLibcuda, offset: int) -> None:
    stream = libcuda.stream(fill=0xAB)
    _smctrl.set_mask(stream, offset, 128, 0x1111_2222_3333_4444, 0x5555_6666_7777_8888)
    written = struct.pack("<5I", 1, 0x3333_4444, 0x1111_2222, 0x7777_8888, 0x5555_6666)
    rest = b"\xab" * (OBJECT_BYTES - offset - len(written))
    assert object_bytes(stream) == b"\xab" * offset + written + rest


@pytest.mark.parametrize("offset", [0, 0x47C, OBJECT_BYTES - 8])
def test_the_64_bit_struct_is_written_as_the_driver_reads_it(libcuda: FakeLibcuda, offset: int) -> None:
    stream = libcuda.stream(fill=0xAB)
    _smctrl.set_mask(stream, offset, 64, 0x1111_2222_3333_4444, 0)
    written = struct.pack("<2I", 0x1111_2222, 0x3333_4444)
    rest = b"\xab" * (OBJECT_BYTES - offset - len(written))
    assert object_bytes(stream) == b"\xab" * offset + written + rest


@given(low=st.integers(0, U64_MAX), high=st.integers(0, U64_MAX), enabled=st.integers(0, 2**32 - 1))
def test_a_128_bit_mask_is_read_back(libcuda: FakeLibcuda, low: int, high: int, enabled: int) -> None:
    stream = libcuda.stream()
    _smctrl.set_mask(stream, 0x51C, 128, low, high, enabled=enabled)
    assert _smctrl.get_mask(stream, 0x51C, 128) == (enabled, low, high)


@given(low=st.integers(0, U64_MAX))
def test_a_64_bit_mask_is_read_back(libcuda: FakeLibcuda, low: int) -> None:
    stream = libcuda.stream()
    _smctrl.set_mask(stream, 0x47C, 64, low, 0)
    assert _smctrl.get_mask(stream, 0x47C, 64) == (int(low != 0), low, 0)


@pytest.mark.parametrize("layout", [64, 128])
def test_clearing_leaves_no_mask(libcuda: FakeLibcuda, layout: int) -> None:
    stream = libcuda.stream(fill=0xAB)
    _smctrl.clear_mask(stream, 0x51C, layout)
    assert _smctrl.get_mask(stream, 0x51C, layout) == (0, 0, 0)
    assert object_bytes(stream).count(0) == FIELD_BYTES[layout]


def test_names_of_arguments(libcuda: FakeLibcuda) -> None:
    stream = libcuda.stream()
    _smctrl.set_mask(stream=stream, offset=4, layout=128, disable_low=1, disable_high=2, enabled=3)
    assert _smctrl.get_mask(stream=stream, offset=4, layout=128) == (3, 1, 2)
    _smctrl.clear_mask(stream=stream, offset=4, layout=128)
    assert object_bytes(stream) == bytes(OBJECT_BYTES)


# Refused arguments: nothing may be written


@field_access
@pytest.mark.parametrize("layout", [0, 1, 65, 127, 256])
def test_unknown_layout(libcuda: FakeLibcuda, access: Callable[..., object], layout: int) -> None:
    stream = libcuda.stream(fill=0xAB)
    with pytest.raises(ValueError, match=f"layout must be 64 or 128 .*, got {layout}"):
        access(stream, 0x51C, layout)
    assert object_bytes(stream) == b"\xab" * OBJECT_BYTES


@field_access
@pytest.mark.parametrize("layout", [64, 128])
@pytest.mark.parametrize("past_the_end", [True, False])
def test_offset_out_of_the_object(
    libcuda: FakeLibcuda, access: Callable[..., object], layout: int, past_the_end: bool
) -> None:
    stream = libcuda.stream(fill=0xAB)
    last = OBJECT_BYTES - FIELD_BYTES[layout]
    offset = last + 4 if past_the_end else last - 2
    with pytest.raises(ValueError, match=f"multiple of 4 and at most {last}, got {offset}"):
        access(stream, offset, layout)
    with pytest.raises(ValueError, match=f"got {U64_MAX - 3}"):
        access(stream, U64_MAX - 3, layout)
    assert object_bytes(stream) == b"\xab" * OBJECT_BYTES


@field_access
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_the_drivers_special_streams(access: Callable[..., object], stream: int) -> None:
    with pytest.raises(ValueError, match=f"handle of a created CUstream, got {stream}"):
        access(stream, 0x51C, 128)


@field_access
@pytest.mark.parametrize("shift", [None, 1, 2])
def test_a_handle_without_an_object(
    libcuda: FakeLibcuda, access: Callable[..., object], shift: int | None
) -> None:
    stream = libcuda.stream()
    point_to(stream, 0 if shift is None else object_address(stream) + shift)
    with pytest.raises(ValueError, match=f"stream {stream} does not point to a driver object"):
        access(stream, 0x51C, 128)


@field_access
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    ("value", "error"), [("5", TypeError), (None, TypeError), (-1, OverflowError), (2**64, OverflowError)]
)
def test_arguments_that_are_no_unsigned_integers(
    libcuda: FakeLibcuda,
    access: Callable[..., object],
    position: int,
    value: object,
    error: type[Exception],
) -> None:
    field: list[object] = [libcuda.stream(), 0x51C, 128]
    field[position] = value
    with pytest.raises(error):
        access(*field)


def test_a_64_bit_mask_has_no_upper_half(libcuda: FakeLibcuda) -> None:
    stream = libcuda.stream(fill=0xAB)
    with pytest.raises(ValueError, match="no TPC above 63, got disable_high 1"):
        _smctrl.set_mask(stream, 0x47C, 64, 0, 1)
    assert object_bytes(stream) == b"\xab" * OBJECT_BYTES


def test_enabled_is_one_word(libcuda: FakeLibcuda) -> None:
    stream = libcuda.stream(fill=0xAB)
    with pytest.raises(ValueError, match="enabled must fit 32 bits, got 4294967296"):
        _smctrl.set_mask(stream, 0x51C, 128, 0, 0, 2**32)
    assert object_bytes(stream) == b"\xab" * OBJECT_BYTES


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
