"""Text, a line a sample: `lines("corpus.txt")[i]` is line i + 1, without its end.

Blank lines count. Several files follow one another. Cost and limits: `linewise.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.data.readers.files import PathLike
from shoal.data.readers.linewise import LineRecords


class Lines(LineRecords):
    """Made by `lines`."""

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        encoding: str,
        options: Mapping[str, Any] | None,
    ):
        super().__init__(paths, encoding, options)
        self._index([self._scan(number) for number in range(len(self.files))])


def lines(
    paths: PathLike | Sequence[PathLike],
    *,
    encoding: str = "utf-8",
    options: Mapping[str, Any] | None = None,
) -> Lines:
    """A source of text: each line of one or several files, by path or URL.

    `options` go to the back end of a URL, as those of fsspec do.
    """
    return Lines(paths, encoding, options)
