"""Several cores for a computation, in a process that has one thread for all else.

Ranks are what fills the cores, so each computes with one thread. But a parameter server in lockstep
steps while all workers wait, and may use their cores. Threads of OpenMP that have nothing to do
look for work for a while, on cores that others need by then, unless OMP_WAIT_POLICY is passive when
torch is loaded, as it is in a run of `shoal`. Where it is not, there are no spare threads.

A server does all of its work in a thread that is not its process's first one: what OpenMP knows of
its threads does not live through a fork in the one that forked, and servers are forked. Cost: less
than a microsecond. Not for what adds up many numbers into one: then bits depend on the number of
threads.
"""

import os
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
    """`host` what calls `do`, unless this process was never forked."""

    def __init__(self, num_threads: int = 1):
        self.num_threads = num_threads

    def host(self, work: Callable[[], object]) -> None:
        """Do all of a process's work where several threads can be had."""
        if self.num_threads == 1:
            work()
            return
        with ThreadPoolExecutor(1, "shoal-crew") as thread:
            thread.submit(work).result()

    def do(self, work: Callable[[], object]) -> None:
        """Do it with as many threads; whatever it raises is raised here."""
        before = torch.get_num_threads()
        torch.set_num_threads(max(before, self.num_threads))
        try:
            work()
        finally:
            torch.set_num_threads(before)
