"""Several cores for a computation, in a process that has one thread for all else.

Ranks are what fills the cores, so each computes with one thread. But a parameter server in lockstep
steps while all workers wait, and may use their cores. Threads of OpenMP that have nothing to do
look for work for a while, on cores that others need by then, unless OMP_WAIT_POLICY is passive when
torch is loaded, as it is in a run of `shoal`. Where it is not, there are no spare threads.

The computation is done by a thread of its own, which does not know whether others want gradients:
what OpenMP knows of its threads does not live through a fork in the one that forked, and ranks and
servers are forked. A change of threads costs some 0.1 ms, so whoever calls a crew again and again
does it from that thread. Not for what adds up many numbers into one: then bits depend on the number
of threads.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

MOST_THREADS = 8  # more do not read memory any faster
_idle_sleep = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"  # as torch was loaded


def spare_threads(num_sharing: int) -> int:
    """How many each of so many processes of this host may have while all others wait."""
    if not _idle_sleep:
        return 1
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // num_sharing))


class Crew:
    def __init__(self, num_threads: int = 1):
        self._num_threads = num_threads
        self._thread: ThreadPoolExecutor | None = None
        if num_threads > 1:
            self._thread = ThreadPoolExecutor(1, "shoal-crew")
            self._own = self._thread.submit(threading.get_ident).result()

    def host(self, work: Callable[[], object]) -> None:
        """Do something that will call `do`, in the thread where that costs least."""
        if self._thread is None:
            work()
        else:
            self._thread.submit(work).result()

    def do(self, work: Callable[[], object]) -> None:
        """Do it, with as many threads; whatever it raises is raised here."""
        if self._thread is None:
            work()
        elif threading.get_ident() == self._own:
            self._with_all(work)
        else:
            self._thread.submit(self._with_all, work).result()

    def _with_all(self, work: Callable[[], object]) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            work()
        finally:
            torch.set_num_threads(before)  # also what other threads begin with

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
