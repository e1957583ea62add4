"""The process of a job of the local queue: `shoal train`, between a byte that says go and a file
that holds its exit code (`cluster/local_queue/job_process.py`).

Its arguments are that file, the cores that it may use, and those of `shoal train`.
"""

import os
import sys
from pathlib import Path


def run_job(end: Path, cores: str, arguments: list[str]) -> int:
    """Wait to be released, train, and leave the exit code."""
    from shoal.cluster.local_queue.job_process import JobEnd
    from shoal.storage.decoding import encode_json
    from shoal.storage.files import write_atomic

    if not os.read(0, 1):  # the agent is gone, and its journal does not know this process
        write_atomic(end, encode_json(JobEnd(None, has_begun=False)))
        return 0
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    from shoal.cli.main import run_here

    code = 1
    try:
        code = run_here(["train", *arguments])
    finally:
        write_atomic(end, encode_json(JobEnd(code)))
    return code


if __name__ == "__main__":
    sys.argv[0] = "shoal"
    sys.exit(run_job(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
