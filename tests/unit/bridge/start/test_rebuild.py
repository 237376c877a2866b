"""bridge.start.rebuild: the attempt of a task that counts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bridge.errors import EnvironmentFailure
from bridge.start.rebuild import SendingTask, Superseded


def elsewhere(call: Callable[[], object]) -> object:
    """The result of a call in a thread of its own, or its exception."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - returned
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def test_the_last_attempt_that_has_begun_counts() -> None:
    """An earlier one, of an executor that is lost and goes on, is refused, also at its end; the next one repeats it."""
    task = SendingTask()
    assert not task.begin()
    task.must_count()
    assert elsewhere(task.begin) is True
    with pytest.raises(Superseded):
        task.must_count()
    with pytest.raises(Superseded):
        task.end()
    assert not task.is_done


def test_an_attempt_is_done_at_its_end() -> None:
    """A later one makes it undone: its rows are dropped."""
    task = SendingTask()
    assert not task.begin()
    task.end()
    assert task.is_done
    assert elsewhere(task.begin) is True and not task.is_done


def test_a_job_without_an_attempt_is_done() -> None:
    """Spark may have no task for a log whose records are all finished."""
    task = SendingTask()
    assert task.is_done
    assert not task.begin() and not task.is_done


def test_two_attempts_on_one_connection_are_refused() -> None:
    """Their rows cannot be told apart."""
    task = SendingTask()
    assert not task.begin()
    with pytest.raises(EnvironmentFailure) as raised:
        task.begin()
    assert raised.value.code == "DB-3087"
