"""What each process has for itself: made anew in a fork, whatever other threads were doing."""

import fcntl
import os
import resource
import threading

import pytest

from shoal.system.processes import PerProcess, batch_scheduling, readable


def in_a_fork(act) -> bool:
    """Whether `act` is true in a child; one that hangs is ended."""
    child = os.fork()
    if child == 0:
        threading.Timer(10, os._exit, [3]).start()
        try:
            os._exit(0 if act() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_makes_its_own_once() -> None:
    made = PerProcess(lambda: [os.getpid()])
    own = made.get()
    assert own == [os.getpid()] and made.get() is own
    assert in_a_fork(lambda: made.get() == [os.getpid()] and made.get() is made.get())
    assert made.get() is own


def test_a_fork_waits_for_no_thread_of_its_parent() -> None:
    """A thread makes one while another forks: in the child nobody would ever finish that."""
    begun, go_on, parent = threading.Event(), threading.Event(), os.getpid()

    def make() -> int:
        if os.getpid() == parent:
            begun.set()
            assert go_on.wait(10)
        return os.getpid()

    made = PerProcess(make)
    thread = threading.Thread(target=made.get)
    thread.start()
    assert begun.wait(10)
    try:
        assert in_a_fork(lambda: made.get() == os.getpid())
    finally:
        go_on.set()
        thread.join()


def test_a_lock_is_free_in_a_fork() -> None:
    locked = PerProcess(threading.RLock).get
    with locked():
        assert in_a_fork(lambda: locked().acquire(blocking=False))


def test_threads_share_one() -> None:
    made = PerProcess(object)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(made.get())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_descriptors_of_any_number_are_watched() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1100:
        pytest.skip("this system allows no descriptors from 1,024 on")
    ours, theirs = os.pipe()
    high = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1050)
    try:
        assert readable([high, ours], 0.0) == []
        os.write(theirs, b"x")
        assert sorted(readable([high, ours])) == [ours, high]
        os.read(ours, 1)
        os.close(theirs)
        assert readable([high], 0.0) == [high], "its end is not seen"
    finally:
        os.close(ours)
        os.close(high)


def test_who_gives_way_does_so_for_a_while() -> None:
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    with pytest.raises(ValueError, match="on the way"), batch_scheduling():
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
        raise ValueError("on the way")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_what_the_user_chose_stays() -> None:
    def stays() -> bool:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with batch_scheduling():
            inside = os.sched_getscheduler(0)
        return inside == os.sched_getscheduler(0) == os.SCHED_IDLE

    assert in_a_fork(stays)


def test_where_it_is_forbidden_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with batch_scheduling():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
