"""The stand-in libraries themselves, through their C interface."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch_npu

from moe_graph.emulator import loader

CANN = ctypes.CDLL(str(loader.LIBRARY_DIR / loader.CANN_LIBRARY))
CANN.aclGetRecentErrMsg.restype = ctypes.c_char_p
CANN.aclrtGetSocName.restype = ctypes.c_char_p
CANN.moe_graph_cann_set_error.argtypes = [ctypes.c_char_p]
CANN.moe_graph_cann_take_error.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
CANN.moe_graph_cann_take_error.restype = ctypes.c_size_t

NO_CONTEXT = 107002
OUT_OF_MEMORY = 207001


def recent_error() -> str:
    return CANN.aclGetRecentErrMsg().decode()


def take_error() -> str:
    buffer = ctypes.create_string_buffer(4096)
    length = CANN.moe_graph_cann_take_error(buffer, len(buffer))
    return buffer.raw[:length].decode()


@pytest.fixture
def block() -> Iterator[ctypes.c_void_p]:
    pointer = ctypes.c_void_p()
    assert CANN.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(1000), 0) == 0
    yield pointer
    assert CANN.aclrtFree(pointer) == 0


def test_every_library_of_torch_npu_resolves_at_once() -> None:
    """RTLD_NOW refuses a library that has one symbol nobody defines."""
    package = Path(torch_npu.__file__).parent
    needs_atb = {"libop_plugin_atb.so"}  # linked to a library that torch_npu opens on request only
    libraries = [path for path in package.rglob("*.so") if path.name not in needs_atb]
    assert len(libraries) >= 6
    for path in libraries:
        ctypes.CDLL(str(path), mode=os.RTLD_NOW)


def test_each_name_leads_to_the_one_library() -> None:
    for name in loader.SONAMES:
        library = ctypes.CDLL(name)
        assert ctypes.cast(library.aclrtMalloc, ctypes.c_void_p).value == (
            ctypes.cast(CANN.aclrtMalloc, ctypes.c_void_p).value
        )


def test_memory_is_aligned_and_poisoned(block: ctypes.c_void_p) -> None:
    assert block.value is not None
    assert block.value % 512 == 0
    assert ctypes.string_at(block.value, 1000) == b"\xff" * 1000


def test_double_free_is_an_error() -> None:
    pointer = ctypes.c_void_p()
    assert CANN.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(8), 0) == 0
    assert CANN.aclrtFree(pointer) == 0
    assert CANN.aclrtFree(pointer) != 0
    assert "aclrtFree" in recent_error()
    assert "freed twice" in recent_error()


def test_pointer_into_a_block_cannot_be_freed(block: ctypes.c_void_p) -> None:
    assert CANN.aclrtFree(ctypes.c_void_p((block.value or 0) + 512)) != 0


def test_too_much_memory_is_an_error() -> None:
    pointer = ctypes.c_void_p()
    for size in (1 << 50, (1 << 64) - 1):
        status = CANN.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(size), 0)
        assert status == OUT_OF_MEMORY
        assert f"cannot allocate {size} bytes on the emulated device 0" in recent_error()


def test_memory_in_use_is_counted() -> None:
    free, total, after = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
    pointer = ctypes.c_void_p()
    CANN.aclrtGetMemInfo(0, ctypes.byref(free), ctypes.byref(total))
    CANN.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(4096), 0)
    CANN.aclrtGetMemInfo(0, ctypes.byref(after), ctypes.byref(total))
    assert free.value - after.value == 4096
    CANN.aclrtFree(pointer)
    CANN.aclrtGetMemInfo(0, ctypes.byref(after), ctypes.byref(total))
    assert free.value == after.value


def copy(target: int | None, limit: int, source: int | None, count: int) -> int:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return CANN.aclrtMemcpy(pointer(target), size(limit), pointer(source), size(count), 0)


def test_copies_stay_within_their_memory(block: ctypes.c_void_p) -> None:
    source = ctypes.create_string_buffer(b"x" * 4096)
    here, there = ctypes.addressof(source), block.value or 0
    assert copy(there, 1000, here, 1000) == 0
    assert ctypes.string_at(there, 1000) == b"x" * 1000
    assert copy(there, 10, here, 11) != 0
    assert "the destination has 10 bytes, got a request for 11" in recent_error()
    assert copy(there, 4096, here, 4096) != 0
    assert "the destination has 1024 bytes" in recent_error()
    assert copy(here, 4096, there + 512, 1024) != 0
    assert "the source has 512 bytes" in recent_error()
    assert copy(None, 8, here, 8) != 0
    assert "the destination is null" in recent_error()
    assert copy(None, 0, None, 0) == 0


def test_fills_stay_within_their_memory(block: ctypes.c_void_p) -> None:
    size = ctypes.c_size_t
    assert CANN.aclrtMemset(block, size(1000), 0, size(1000)) == 0
    assert ctypes.string_at(block.value or 0, 1000) == bytes(1000)
    assert CANN.aclrtMemset(block, size(1 << 20), 0, size(1 << 20)) != 0


def test_streams_and_events() -> None:
    stream, start, end = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    assert CANN.aclrtCreateStreamWithConfig(ctypes.byref(stream), 0, 0) == 0
    for event in (start, end):
        assert CANN.aclrtCreateEventExWithFlag(ctypes.byref(event), 0) == 0
        assert CANN.aclrtRecordEvent(event, stream) == 0
    elapsed = ctypes.c_float(-1)
    assert CANN.aclrtEventElapsedTime(ctypes.byref(elapsed), start, end) == 0
    assert elapsed.value >= 0
    assert CANN.aclrtDestroyEvent(start) == CANN.aclrtDestroyEvent(end) == 0
    assert CANN.aclrtDestroyEvent(end) != 0
    assert CANN.aclrtDestroyStream(stream) == 0
    assert CANN.aclrtDestroyStream(stream) != 0
    assert "the stream does not exist" in recent_error()


def test_device_that_does_not_exist() -> None:
    assert CANN.aclrtSetDevice(7) != 0
    assert "device 7 does not exist: got MOE_GRAPH_DEVICES=1" in recent_error()
    with pytest.raises(RuntimeError, match="device 7 does not exist"):
        torch.ones(1, device="npu:7")


def test_thread_has_no_device_before_it_sets_one() -> None:
    seen: list[int] = []

    def work() -> None:
        context = ctypes.c_void_p()
        seen.append(CANN.aclrtGetCurrentContext(ctypes.byref(context)))
        seen.append(CANN.aclrtSetCurrentContext(context))
        CANN.aclrtSetDevice(0)
        seen.append(CANN.aclrtGetCurrentContext(ctypes.byref(context)))
        seen.append(CANN.aclrtSetCurrentContext(context))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [NO_CONTEXT, 100000, 0, 0]


def test_out_of_memory_reaches_torch() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(1 << 50, dtype=torch.uint8, device="npu")


def test_unsupported_function_says_so() -> None:
    assert CANN.rtKernelLaunch() != 0
    assert "rtKernelLaunch: launching a device binary is not emulated" in recent_error()
    assert CANN.aclopCompileAndExecute(b"Sort") != 0
    assert "operator Sort has no kernel on the emulated NPU" in recent_error()


def test_error_texts_belong_to_threads() -> None:
    CANN.moe_graph_cann_set_error(b"mine")
    seen: list[str] = []

    def other() -> None:
        CANN.moe_graph_cann_set_error(b"theirs")
        seen.append(take_error())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == ["theirs"]
    assert take_error() == "mine"


def test_error_text_is_found_by_the_thread_that_waited() -> None:
    take_error()
    thread = threading.Thread(target=CANN.moe_graph_cann_set_error, args=(b"compile failed",))
    thread.start()
    thread.join()
    assert take_error() == "compile failed"
    assert take_error() == ""


def test_soc_name() -> None:
    assert CANN.aclrtGetSocName() == b"Ascend910B3"
    assert torch.npu.get_device_name(0) == "Ascend910B3"
