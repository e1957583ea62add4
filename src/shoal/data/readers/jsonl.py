"""JSON lines: each line of a file is a value, mostly an object, which comes as a dict.

Blank lines are left out. A line is parsed when it is asked for, so a bad one is a `BadRecord` with
its file and line, and the others stay usable. NaN and Infinity are not JSON and are refused. Cost
and limits: `linewise.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.data.readers.files import PathLike
from shoal.data.readers.linewise import LineRecords


class JsonLines(LineRecords):
    """Made by `jsonl`."""

    def __init__(self, paths: PathLike | Sequence[PathLike], options: Mapping[str, Any] | None):
        super().__init__(paths, "utf-8", options)
        scanned = (self._scan(number) for number in range(len(self.files)))
        self._index([spans.without_blank() for spans in scanned])

    def decoded(self, text: str, index: int) -> Any:
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self.bad(index, f"no JSON: {error}. Each line must hold one value.") from None


def jsonl(
    paths: PathLike | Sequence[PathLike], *, options: Mapping[str, Any] | None = None
) -> JsonLines:
    """A source of what the lines of JSON files hold; paths or URLs, in UTF-8.

    `options` go to the back end of a URL, as those of fsspec do.
    """
    return JsonLines(paths, options)
