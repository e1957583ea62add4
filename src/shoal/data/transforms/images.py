"""Augmentation of images: plain functions `(image, random, ...) -> image`.

    from shoal.data.transforms import images
    change = shoal.data.chain(images.flip, partial(images.crop, padding=4), images.jitter)
    data = shoal.data.mapped(pairs, shoal.data.on("inputs", change))

An image is an array or a tensor [channels, height, width], of bytes or of floats; what comes out is
of the same kind and type, and a new one wherever it differs (`channels_first` and `to_float` turn
what files hold into that). Pixels are computed with operations that IEEE 754 rounds in one way only
(no sine, no logarithm), so one sample looks the same on unlike machines.

Not for images on a GPU. Cost: one to four passes over the pixels; `rotate` gathers four neighbours
of each. Resizing takes the nearest four pixels and no more: shrink large images once, before.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.transforms.randomness import Random, require_probability
from shoal.errors import RecipeError, UsageError

Image = TypeVar("Image", NDArray[Any], Tensor)
Pixels = NDArray[Any]

_KINDS = (np.uint8, np.float16, np.float32, np.float64)
_GREY = (0.299, 0.587, 0.114)  # how bright red, green and blue are to the eye (ITU-R BT.601)
_FINE = float(1 << 20)


def flip(image: Image, random: Random, *, chance: float = 0.5, axis: str = "horizontal") -> Image:
    """Mirror the image, with this chance; `axis` "vertical" turns it upside down."""
    if axis not in ("horizontal", "vertical"):
        raise UsageError(f"axis={axis!r}. An image is flipped horizontal or vertical.")
    require_probability(chance)
    if random.random() >= chance:
        return image
    way = np.s_[:, :, ::-1] if axis == "horizontal" else np.s_[:, ::-1]
    return _changed(image, lambda pixels: pixels[way])


def crop(
    image: Image,
    random: Random,
    *,
    size: int | tuple[int, int] | None = None,
    padding: int = 0,
    fill: float = 0,
) -> Image:
    """Cut out a part of this size (by default the image's own) at random, after padding."""

    def change(pixels: Pixels) -> Pixels:
        height, width = pixels.shape[1:] if size is None else _pair(size)
        rows, columns = pixels.shape[1] + 2 * padding, pixels.shape[2] + 2 * padding
        if not (0 < height <= rows and 0 < width <= columns):
            raise RecipeError(
                f"a part of {height} x {width} does not fit into {rows} x {columns}. Use a smaller "
                "size or more padding"
            )
        top = int(random.integers(rows - height + 1)) - padding
        left = int(random.integers(columns - width + 1)) - padding
        return _window(pixels, top, left, height, width, fill)

    return _changed(image, change)


def resize(image: Image, *, size: int | tuple[int, int]) -> Image:
    """The whole image at another size; a number is for both height and width."""
    return _changed(image, lambda pixels: resized(pixels, *_pair(size)))


def resized_crop(
    image: Image,
    random: Random,
    *,
    size: int | tuple[int, int],
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Image:
    """Cut out a share of the area, of a ratio of width to height, and resize it to `size`."""
    if not 0 < area[0] <= area[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
        raise UsageError(f"area={area}, ratio={ratio}. Both are ranges above 0, area up to 1.")

    def change(pixels: Pixels) -> Pixels:
        height, width = pixels.shape[1:]
        share, shape = random.uniform(*area), random.uniform(*ratio)
        wide = min(width, max(1, round(math.sqrt(height * width * share * shape))))
        high = min(height, max(1, round(math.sqrt(height * width * share / shape))))
        top = int(random.integers(height - high + 1))
        left = int(random.integers(width - wide + 1))
        return resized(pixels[:, top : top + high, left : left + wide], *_pair(size))

    return _changed(image, change)


def turn(image: Image, random: Random, *, by: Sequence[int] = (0, 90, 180, 270)) -> Image:
    """Turn the image by one of these angles, multiples of 90 degrees."""
    if not by or any(angle % 90 for angle in by):
        raise UsageError(f"by={tuple(by)}. turn() takes multiples of 90 degrees; or use rotate().")
    height, width = image.shape[-2:]
    if height != width and any(angle % 180 for angle in by):
        raise RecipeError(
            f"an image of {height} x {width} changes its shape if it is turned by 90 degrees. Use "
            "by=(0, 180), or crop it to a square first"
        )
    times = by[int(random.integers(len(by)))] // 90
    return _changed(image, lambda pixels: np.rot90(pixels, times, axes=(1, 2)))


def rotate(image: Image, random: Random, *, degrees: float = 10.0, fill: float = 0) -> Image:
    """Turn the image about its middle by an angle of up to so many degrees either way."""
    if not 0 < degrees <= 45:
        raise UsageError(f"degrees={degrees}. rotate() takes above 0 and up to 45; see turn().")
    # By the tangent of half the angle, sine and cosine are fractions, equal on every machine.
    most = round(math.tan(math.radians(degrees) / 2), 9)
    half = random.uniform(-most, most)
    cosine, sine = (1 - half * half) / (1 + half * half), 2 * half / (1 + half * half)

    def change(pixels: Pixels) -> Pixels:
        height, width = pixels.shape[1:]
        down, right = np.mgrid[:height, :width].astype(np.float64)
        down -= (height - 1) / 2
        right -= (width - 1) / 2
        rows = cosine * down - sine * right + (height - 1) / 2
        columns = sine * down + cosine * right + (width - 1) / 2
        return _like(pixels, _between(pixels, rows, columns, fill))

    return _changed(image, change)


def jitter(
    image: Image,
    random: Random,
    *,
    brightness: float = 0.2,
    contrast: float = 0.2,
    saturation: float = 0.2,
) -> Image:
    """Change brightness, contrast and saturation by factors of up to 1 - x to 1 + x.

    Floats must lie from 0 to 1, and stay there. Saturation is left alone in images of one channel.
    """
    given = (brightness, contrast, saturation)
    if not all(0 <= part <= 1 for part in given):
        raise UsageError(f"brightness, contrast, saturation = {given}. Each is from 0 to 1.")
    factors = [random.uniform(1 - part, 1 + part) for part in given]

    def change(pixels: Pixels) -> Pixels:
        top = 255.0 if pixels.dtype == np.uint8 else 1.0
        if top == 1.0 and pixels.size and (pixels.min() < 0 or pixels.max() > 1):
            raise RecipeError(
                f"an image of floats from {pixels.min():.3g} to {pixels.max():.3g} has no colours. "
                "jitter() needs 0 to 1; use it before the image is standardised"
            )
        bright = np.clip(pixels.astype(np.float32) * np.float32(factors[0]), 0, top)
        middle = np.float32(_mean_grey(bright))
        contrasted = np.clip(_blend(bright, middle, factors[1]), 0, top)
        if len(pixels) == 3:
            grey = _grey(contrasted)
            contrasted = np.clip(_blend(contrasted, grey, factors[2]), 0, top)
        return _like(pixels, contrasted)

    return _changed(image, change)


def cutout(
    image: Image, random: Random, *, size: int | tuple[int, int] = 8, fill: float = 0
) -> Image:
    """Fill a rectangle somewhere; at the rim a part of it may lie outside."""

    def change(pixels: Pixels) -> Pixels:
        height, width = _pair(size)
        top = int(random.integers(pixels.shape[1])) - height // 2
        left = int(random.integers(pixels.shape[2])) - width // 2
        result = pixels.copy()
        result[:, max(0, top) : max(0, top + height), max(0, left) : max(0, left + width)] = fill
        return result

    return _changed(image, change)


def standardize(image: Image, *, mean: Sequence[float], std: Sequence[float]) -> Image:
    """Subtract a mean and divide by a deviation, channel by channel; bytes become floats."""
    if not mean or len(mean) != len(std) or not all(part > 0 for part in std):
        raise UsageError(f"mean={mean}, std={std}. Each has one number a channel, std above 0.")

    def change(pixels: Pixels) -> Pixels:
        if len(pixels) != len(mean):
            raise RecipeError(f"an image of {len(pixels)} channels, and {len(mean)} means")
        kind = np.float64 if pixels.dtype == np.float64 else np.float32
        shift: Pixels = np.array(mean).astype(kind).reshape(-1, 1, 1)
        unit: Pixels = np.array(std).astype(kind).reshape(-1, 1, 1)
        standard: Pixels = np.subtract(pixels, shift, dtype=kind) / unit
        return standard

    return _changed(image, change)


def to_float(image: Image) -> Image:
    """Bytes as float32 from 0 to 1; floats as they are."""

    def change(pixels: Pixels) -> Pixels:
        is_bytes = pixels.dtype == np.uint8
        return pixels.astype(np.float32) / np.float32(255) if is_bytes else pixels

    return _changed(image, change)


def channels_first(image: Image) -> Image:
    """[height, width, channels] or [height, width], as files have it, as [channels, ...]."""
    if image.ndim == 2:
        return image[None]
    if image.ndim != 3:
        raise RecipeError(f"an image of the shape {list(image.shape)}. It has 2 or 3 dims")
    if isinstance(image, Tensor):
        return image.permute(2, 0, 1).contiguous()
    return np.ascontiguousarray(np.moveaxis(image, -1, 0))


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """An array of another size: each pixel from the four nearest."""
    if not pixels.size or height < 1 or width < 1:
        raise RecipeError(f"{list(pixels.shape)} cannot be resized to {height} x {width}")
    result = pixels.astype(np.float64 if pixels.dtype == np.float64 else np.float32)
    for axis, size in ((1, height), (2, width)):
        count = pixels.shape[axis]
        at = np.clip((np.arange(size) + 0.5) * (count / size) - 0.5, 0, count - 1)
        first = np.floor(at).astype(np.int64)
        form = [1, 1, 1]
        form[axis] = size
        share = (at - first).astype(result.dtype).reshape(form)
        after = result.take(np.minimum(first + 1, count - 1), axis=axis)
        result = _blend(after, result.take(first, axis=axis), share)
    return _like(pixels, result)


def _changed(image: Image, change: Callable[[Pixels], Pixels]) -> Image:
    """`change` applied to the pixels; a tensor stays one."""
    pixels = image.detach().numpy() if isinstance(image, Tensor) else image
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 3 or pixels.dtype not in _KINDS:
        shown = getattr(image, "shape", None), getattr(image, "dtype", type(image).__name__)
        raise RecipeError(
            f"{shown[1]} {list(shown[0]) if shown[0] is not None else ''} is no image. It must be "
            "[channels, height, width] of bytes (uint8) or floats; see images.channels_first"
        )
    if pixels.shape[0] > 4 and pixels.shape[2] <= 4:
        raise RecipeError(
            f"an image of the shape {list(pixels.shape)} has its channels last. They must come "
            "first: use images.channels_first"
        )
    result = np.ascontiguousarray(change(pixels))
    if not isinstance(image, Tensor):
        return result
    # Some changes give back what they were given, which may be memory that is not to be written.
    return torch.from_numpy(result if result.flags.writeable else result.copy())


def _window(pixels: Pixels, top: int, left: int, height: int, width: int, fill: float) -> Pixels:
    """A part that may reach beyond the image, where it is filled."""
    result = np.full((len(pixels), height, width), fill, pixels.dtype)
    rows = slice(max(0, top), min(pixels.shape[1], top + height))
    columns = slice(max(0, left), min(pixels.shape[2], left + width))
    if rows.start < rows.stop and columns.start < columns.stop:
        result[
            :, rows.start - top : rows.stop - top, columns.start - left : columns.stop - left
        ] = pixels[:, rows, columns]
    return result


def _between(
    pixels: Pixels, rows: NDArray[np.float64], columns: NDArray[np.float64], fill: float
) -> Pixels:
    """The values at places between pixels: of the four around them, those outside are `fill`."""
    top, left = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    down, right = rows - top, columns - left
    total = np.zeros((len(pixels), *rows.shape))
    for row, row_share in ((top, 1 - down), (top + 1, down)):
        for column, column_share in ((left, 1 - right), (left + 1, right)):
            inside = (row >= 0) & (row < pixels.shape[1]) & (column >= 0)
            inside &= column < pixels.shape[2]
            values = pixels[:, np.where(inside, row, 0), np.where(inside, column, 0)]
            total += np.where(inside, values, fill) * (row_share * column_share)
    return total


def _blend(some: Pixels, other: Any, share: Any) -> Pixels:
    """`share` of some and the rest of the other; above 1 it leads away from the other."""
    share = np.asarray(share, some.dtype)
    blended: Pixels = some * share + other * (1 - share)
    return blended


def _grey(pixels: Pixels) -> Pixels:
    if len(pixels) != 3:
        return pixels[:1]
    red, green, blue = (np.float32(part) for part in _GREY)
    grey: Pixels = pixels[0] * red + pixels[1] * green + pixels[2] * blue
    return grey[None]


def _mean_grey(pixels: Pixels) -> float:
    """By whole numbers, whose sum does not depend on the order in which a processor adds."""
    grey = np.rint(_grey(pixels).astype(np.float64) * _FINE).astype(np.int64)
    return int(grey.sum()) / (max(1, grey.size) * _FINE)


def _like(pixels: Pixels, result: Pixels) -> Pixels:
    """The result as the type of the pixels that it came from."""
    if pixels.dtype == np.uint8:
        result = np.clip(np.rint(result), 0, 255)
    return result.astype(pixels.dtype)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size
