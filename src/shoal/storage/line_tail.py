"""Read a file of lines that grows: the whole lines that came since the last time, in blocks.

A line that is being written is read once it is whole. A file that was replaced or cut, as a run
that resumes does with its record, is read again from its beginning, and the caller is told. Cost:
one open and one stat a look; at most `BLOCK_BYTES` are held at a time.
"""

import os
import stat
from pathlib import Path

BLOCK_BYTES = 4 << 20


class LineTail:
    """One reader of one file; `num_skipped` counts lines too long to be one of ours."""

    def __init__(self, path: Path):
        self.path = path
        self.num_skipped = 0
        self._read, self._inode = 0, 0
        self._is_skipping = False  # the rest of a line that was too long

    def more(self, most_bytes: int = BLOCK_BYTES) -> tuple[bytes, bool]:
        """Whole lines of at most `most_bytes`, empty if there are no more; and whether the file is
        another one now. OSError if it is there and cannot be read."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            is_anew, self._read, self._inode = self._read > 0, 0, 0
            return b"", is_anew
        with open(descriptor, "rb", buffering=0) as file:
            now = os.fstat(descriptor)
            if not stat.S_ISREG(now.st_mode):
                raise OSError(None, "it is no regular file", str(self.path))
            is_anew = now.st_ino != self._inode or now.st_size < self._read
            if is_anew:
                is_anew = self._inode != 0
                self._inode, self._read, self._is_skipping = now.st_ino, 0, False
                self.num_skipped = 0
            file.seek(self._read)
            while content := file.read(most_bytes):
                if lines := self._whole(content, len(content) == most_bytes):
                    return lines, is_anew
                if len(content) < most_bytes:
                    break
                file.seek(self._read)
        return b"", is_anew

    def _whole(self, content: bytes, is_full: bool) -> bytes:
        """The whole lines of what was read; the rest is read again next time, unless no line
        could be that long (`is_full`)."""
        begin, end = 0, content.rfind(b"\n") + 1
        if self._is_skipping:
            begin = content.find(b"\n") + 1
            self._is_skipping = not begin
            end = end or len(content)
        elif not end and is_full:
            self.num_skipped, self._is_skipping, end = self.num_skipped + 1, True, len(content)
        self._read += end
        return b"" if self._is_skipping else content[begin:end]
