"""Images that a run logs, as PNG files in its run directory.

Written without a library: a header, the rows deflated, a checksum each. A file has at most 2,048 x
2,048 pixels, and of each name the newest 50 files stay, so that a long run does not fill a disk.
"""

import re
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import UsageError
from shoal.logs import warn_once
from shoal.storage.files import write_atomic

MOST_PIXELS = 2048  # of a side
MOST_FILES = 50  # of a name
_COLOURS = {1: 0, 3: 2, 4: 6}  # channels -> the number that PNG has for them
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def write_image(directory: Path, name: str, step: int, image: Any, writes: bool) -> str:
    """Where the image is, relative to the run directory; only the rank that `writes` writes it."""
    pixels = as_pixels(name, image)
    folder = directory / (_UNSAFE.sub("_", name).strip(".") or "image")
    path = folder / f"step-{step:08d}.png"
    if writes:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, encode_png(pixels))
            _remove_old(folder)
        except OSError as error:
            warn_once(f"{path} could not be written: {error.strerror}. Training continues.")
    return str(path.relative_to(directory.parent))


def as_pixels(name: str, image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Height x width x channels, as bytes."""
    if hasattr(image, "detach"):  # a tensor
        image = image.detach().cpu().float().numpy() if image.is_floating_point() else image.cpu()
    found = np.asarray(image)
    if found.ndim == 2:
        found = found[:, :, None]
    if found.ndim == 3 and found.shape[2] not in _COLOURS and found.shape[0] in _COLOURS:
        found = found.transpose(1, 2, 0)
    if found.ndim != 3 or found.shape[2] not in _COLOURS or 0 in found.shape:
        raise UsageError(
            f"log_image({name!r}, ...) was given the shape {list(np.shape(image))}. An image is "
            "height x width, with 1, 3 or 4 channels first or last."
        )
    if max(found.shape[:2]) > MOST_PIXELS:
        raise UsageError(
            f"log_image({name!r}, ...) was given {found.shape[1]} x {found.shape[0]} pixels. A "
            f"side has {MOST_PIXELS} at the most: make it smaller."
        )
    if found.dtype.kind == "f":
        found = np.clip(np.nan_to_num(found) * 255.0, 0, 255).round()
    elif found.dtype.kind == "b":
        found = found * 255
    elif found.dtype.kind not in "iu":
        raise UsageError(f"log_image({name!r}, ...) was given {found.dtype}, and takes numbers.")
    return np.ascontiguousarray(np.clip(found, 0, 255).astype(np.uint8))


def encode_png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Height x width x channels as the bytes of a PNG file."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), dtype=np.uint8)  # each begins with its filter
    rows[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    content = zlib.compress(rows.tobytes(), 6)
    chunks = [_chunk(b"IHDR", head), _chunk(b"IDAT", content), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def _remove_old(folder: Path) -> None:
    for path in sorted(folder.glob("step-*.png"))[:-MOST_FILES]:
        with suppress(FileNotFoundError):
            path.unlink()
