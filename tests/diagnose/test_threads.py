"""Several jobs at a time: order, threads, and what an error leaves behind."""

import threading
import time

import pytest
import torch

from attncond.diagnose.threads import side_by_side


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_and_from_single_threads():
    names = set()

    def job(i):
        names.add(threading.current_thread().name)
        time.sleep(0.02 if i % 2 == 0 else 0.0)  # the later one is done first
        return i * i, torch.get_num_threads()

    found = list(side_by_side(job, range(6)))
    assert found == [(i, (i * i, 1)) for i in range(6)]
    assert threading.main_thread().name not in names
    assert torch.get_num_threads() == 2


def test_no_more_items_are_taken_than_fit():
    taken = []

    def items():
        for i in range(10):
            taken.append(i)
            yield i

    found = side_by_side(lambda i: i, items())
    next(found)
    assert taken == [0, 1, 2]
    found.close()
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("several", [True, False])
def test_an_error_is_the_callers_and_threads_are_as_before(several):
    def job(i):
        if i == 3:
            raise KeyboardInterrupt
        return i

    found = side_by_side(job, range(9), several)
    assert [next(found)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(found)
    assert torch.get_num_threads() == 2


def test_one_after_the_other_where_asked():
    found = list(side_by_side(lambda i: threading.current_thread(), range(3), several=False))
    assert {thread for _, thread in found} == {threading.current_thread()}
