"""The single thread: its order, that nothing is dropped, and that closing has a deadline."""

import threading
from contextlib import closing

import pytest

from prefetch.workers.ordered_thread import OrderedThread


def threads_named(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_tasks_run_in_the_order_of_submission_and_all_of_them_before_close_returns():
    gate, done = threading.Event(), []
    with closing(OrderedThread("order")) as thread:
        thread.submit(gate.wait)
        for number in range(50):
            thread.submit(lambda number=number: done.append(number))
        gate.set()
    assert done == list(range(50))
    assert not threads_named("order")


def test_a_task_that_raises_tells_its_future_and_the_next_one_runs():
    with closing(OrderedThread("raises")) as thread:
        bad, good = thread.submit(lambda: 1 // 0), thread.submit(lambda: "done")
        assert isinstance(bad.exception(10), ZeroDivisionError)
        assert good.result(10) == "done"


def test_closing_twice_is_fine_and_a_closed_thread_takes_no_task():
    thread = OrderedThread("closed")
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError):
        thread.submit(lambda: None)


def test_a_task_that_hangs_makes_close_give_up_and_show_where_it_stands():
    gate = threading.Event()

    def stuck_in_this_function():
        gate.wait(60)

    thread = OrderedThread("hangs", close_s=0.05)
    thread.submit(stuck_in_this_function)
    try:
        with pytest.raises(TimeoutError, match=r"'hangs' did not end within 0\.05 s") as raised:
            thread.close()
        assert "stuck_in_this_function" in raised.value.__notes__[0]
    finally:
        gate.set()
    thread.close()
    assert not threads_named("hangs")
