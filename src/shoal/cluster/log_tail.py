"""The lines of a file that another process writes to, as they come. Cost: a look every 0.2 s."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.2


class LogTail:
    """The lines that were added to a file since the last time."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0

    def more(self, *, is_over: bool) -> Iterator[str]:
        """Whole lines; the last one may have no end if nothing follows."""
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n") and not is_over:
                    return
                self._read += len(line)
                yield line.decode("utf-8", "replace").rstrip("\r\n")


def follow_file(path: Path, is_over: Callable[[], bool], ask_s: float = LOOK_S) -> Iterator[str]:
    """Lines until `is_over`, which is asked no more often than every `ask_s` seconds."""
    tail, asked_at, ends = LogTail(path), -math.inf, False
    while not ends:
        if (now := time.monotonic()) - asked_at >= ask_s:
            asked_at, ends = now, is_over()
        yield from tail.more(is_over=ends)
        if not ends:
            time.sleep(LOOK_S)
