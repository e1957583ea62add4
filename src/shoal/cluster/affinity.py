"""Which cores the processes of a run may use."""

from contextlib import suppress

import psutil

from shoal.cluster.slots import Cores


def allow_cores(pid: int, cores: Cores) -> None:
    """Let a process and all below it use these cores, whatever they had before."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error, OSError):
                one.cpu_affinity(list(cores))
