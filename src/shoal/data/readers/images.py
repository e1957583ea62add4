"""Images in folders: the class of an image is the folder that it lies in.

    photos/cat/1.jpg   photos/cat/old/2.png   photos/dog/1.jpg

Classes are the folders directly below the root, sorted by name; `classes[target]` is the name. A
sample is a pair: the image as uint8, [height, width, 3], or [height, width] when it is grey, and
the number of its class. An image is decoded each time it is asked for; decode once by a cache or
shards. One that cannot be decoded is a `BadRecord` with its path.

Needs the extra `images` (Pillow). Images are turned as they are stored: the orientation that a
camera notes is not applied.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.readers.files import PathLike
from shoal.data.readers.records import BadRecord
from shoal.data.readers.tree import FileTree
from shoal.data.sources import normalize_index
from shoal.data.validate import require_whole, texts_of
from shoal.errors import UsageError, nearest, require
from shoal.logs import log

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Formats that Pillow hands to other programs (EPS) or that hold documents are not tried.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_GREY = ("1", "L", "LA")
_DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # more than a byte a pixel
MOST_PIXELS = 100_000_000
_PILLOWS_MOST = 178_956_970  # pixels; a larger image it refuses by itself

Pixels = NDArray[np.uint8]


class ImageFolder:
    """Made by `images`. `classes` are the names of the classes, `targets` the class of each."""

    def __init__(
        self,
        tree: FileTree,
        classes: Sequence[str] | None,
        mode: Literal["RGB", "L"] | None,
        most_pixels: int,
    ):
        self._tree, self.mode, self.most_pixels = tree, mode, most_pixels
        folders = [tree.paths[number].partition("/") for number in range(len(tree))]
        outside = [name for name, slash, _ in folders if not slash]
        if outside:
            raise UsageError(
                f"{tree} has {len(outside)} images outside of a class, as {outside[0]}. The class "
                "of an image is the folder that it lies in; put each into one."
            )
        found = sorted({name for name, _, _ in folders})
        self.classes = tuple(found if classes is None else classes)
        for name in found:
            if name not in self.classes:
                raise UsageError(
                    f"{tree} has images in {name}, which is none of the classes that were given. "
                    f"{nearest(name, self.classes)}"
                )
        numbers = {name: number for number, name in enumerate(self.classes)}
        self.targets: NDArray[np.int64] = np.array(
            [numbers[name] for name, _, _ in folders], dtype=np.int64
        )

    def __len__(self) -> int:
        return len(self._tree)

    def __getitem__(self, index: int) -> tuple[Pixels, int]:
        at = normalize_index(index, len(self))
        try:
            image = decode(self._tree.read(at), self.mode, self.most_pixels)
        except BadImage as error:
            raise BadRecord(f"{self._tree.name(at)} (sample {at}): {error}") from error
        return image, int(self.targets[at])

    def identity(self) -> str:
        return self._tree.identity("images", self.classes, self.mode, self.most_pixels)

    def content_name(self) -> str:
        return self._tree.content_name()


class BadImage(ValueError):
    """Bytes that give no picture; the message says why."""


def images(
    root: PathLike,
    *,
    classes: Sequence[str] | None = None,
    mode: Literal["RGB", "L"] | None = None,
    most_pixels: int = MOST_PIXELS,
    options: Mapping[str, Any] | None = None,
) -> ImageFolder:
    """A source of the images below a folder or URL and the numbers of their classes.

    Give `classes` to a second set of the same kind (`classes=train.classes`): should a class have
    no image there, the numbers of the others would differ. `mode` makes all images colour ("RGB")
    or grey ("L"). One of more than `most_pixels` is refused before it is decoded. `options` go to
    the back end of a URL.
    """
    require("PIL", "images")
    if mode not in (None, "RGB", "L"):
        raise UsageError(f"mode={mode!r}. It is 'RGB', 'L', or None to leave images as they are.")
    classes = None if classes is None else texts_of(classes, "images(classes=...)")
    require_whole(most_pixels, "images(most_pixels=...)")
    if most_pixels > _PILLOWS_MOST:
        raise UsageError(
            f"most_pixels={most_pixels:,}. Pillow decodes up to {_PILLOWS_MOST:,}; use that or "
            "less, and cut or scale larger images first."
        )
    tree = FileTree(root, lambda path: path.lower().endswith(ENDINGS), options)
    if tree.num_left_out:
        log.warning("%s: %d files are no images and are left out", tree, tree.num_left_out)
    return ImageFolder(tree, classes, mode, most_pixels)


def decode(
    content: bytes, mode: Literal["RGB", "L"] | None = None, most_pixels: int = MOST_PIXELS
) -> Pixels:
    """An image file's pixels, [height, width, 3], or [height, width] for grey; or a `BadImage`."""
    library = require("PIL.Image", "images")
    try:
        with library.open(io.BytesIO(content), formats=_FORMATS) as image:
            if image.width * image.height > most_pixels:
                raise BadImage(
                    f"it has {image.width} x {image.height} pixels, and {most_pixels:,} are "
                    f"allowed. Raise most_pixels if it is meant, to {_PILLOWS_MOST:,} at most."
                )
            return pixels(image, mode)
    except (BadImage, MemoryError):  # want of memory says nothing of the image
        raise
    except library.UnidentifiedImageError as error:  # which names an address in memory
        raise BadImage(f"it is none of {', '.join(_FORMATS)}, or was cut off") from error
    except Exception as error:  # its plugins raise whatever comes up
        raise BadImage(f"it cannot be decoded: {error or type(error).__name__}") from error


def pixels(image: Any, mode: Literal["RGB", "L"] | None = None) -> Pixels:
    """What a Pillow image shows, as uint8; transparency is left out."""
    if image.mode in _DEEP:
        raise BadImage(
            f"its pixels are of the kind {image.mode}, which a byte cannot hold. Convert it first."
        )
    target = mode or ("L" if image.mode in _GREY else "RGB")
    found = image if image.mode == target else image.convert(target)
    return np.array(found, dtype=np.uint8)
