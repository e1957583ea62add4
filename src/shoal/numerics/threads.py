"""Several compute threads for one computation, in a process that otherwise uses one thread.

Ranks fill the cores, so each computes with one thread. But a parameter server in lockstep steps
while all workers wait, and may use their cores. Idle OpenMP threads spin for a while, on cores that
others need by then, unless OMP_WAIT_POLICY is passive when torch is loaded, as it is in a run of
`shoal`. Where it is not, there are no spare threads.

A server does all of its work in a thread other than its process's first: OpenMP's state of the
thread that forked does not survive the fork, and servers are forked. Cost: less than a microsecond.
Not for reductions: their bits would depend on the number of threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

MOST_THREADS = 8  # more do not read memory any faster
_idle_sleep = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"  # as torch was loaded


def num_spare_threads(num_sharing: int) -> int:
    """How many threads each of `num_sharing` processes of this host may use while others wait."""
    if not _idle_sleep:
        return 1
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // num_sharing))


class ComputeThreads:
    """Sets torch's number of threads for a call. A forked process calls `do` inside of `host`."""

    def __init__(self, num_threads: int = 1):
        self.num_threads = num_threads

    def host(self, work: Callable[[], object]) -> None:
        """Run all of a process's work in a thread that can start OpenMP threads."""
        if self.num_threads == 1:
            work()
            return
        with ThreadPoolExecutor(1, "shoal-crew") as thread:
            thread.submit(work).result()

    def do(self, work: Callable[[], object]) -> None:
        """Run it with `num_threads` threads; what it raises is raised here."""
        before = torch.get_num_threads()
        torch.set_num_threads(max(before, self.num_threads))
        try:
            work()
        finally:
            torch.set_num_threads(before)
