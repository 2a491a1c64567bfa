"""Parts of kernels run side by side, each in one thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from moe_graph.ops.defs.support.workers import one_thread, run_parts

THREADS = 3


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def test_every_part_runs_once_with_one_thread() -> None:
    seen: list[tuple[int, int]] = []
    run_parts(lambda part: seen.append((part, torch.get_num_threads())), range(100))
    assert sorted(seen) == [(part, 1) for part in range(100)]


def test_parts_run_at_the_same_time() -> None:
    meeting = threading.Barrier(THREADS)
    run_parts(lambda _: meeting.wait(timeout=60), range(THREADS))


def test_no_parts_is_fine() -> None:
    run_parts(lambda _: pytest.fail("called"), [])


@pytest.mark.parametrize("bad", [0, 1, 7])
def test_an_error_of_any_part_is_raised(bad: int) -> None:
    def work(part: int) -> None:
        if part == bad:
            raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match=f"part {bad}"):
        run_parts(work, range(8))
    assert torch.get_num_threads() == THREADS


def test_the_error_of_a_helper_is_raised() -> None:
    caller = threading.get_ident()
    meeting = threading.Barrier(THREADS)

    def work(_: int) -> None:
        meeting.wait(timeout=60)
        if threading.get_ident() != caller:
            raise ValueError("in a helper")

    with pytest.raises(ValueError, match="in a helper"):
        run_parts(work, range(THREADS))


def test_one_thread_gives_the_threads_back() -> None:
    with one_thread() as threads:
        assert (threads, torch.get_num_threads()) == (THREADS, 1)
    assert torch.get_num_threads() == THREADS


def test_helpers_leave_the_setting_of_later_threads_alone() -> None:
    run_parts(lambda _: None, range(8))
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [THREADS]


def test_a_forked_process_has_helpers_of_its_own() -> None:
    run_parts(lambda _: None, range(8))
    child = os.fork()
    if child == 0:
        seen: list[int] = []
        run_parts(seen.append, range(8))
        os._exit(0 if sorted(seen) == list(range(8)) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
