"""Images: what each function does to bytes and floats; what it is given stays as it was."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.transforms import images
from shoal.data.transforms.randomness import chain, sample_generator
from shoal.errors import RecipeError, UsageError

CHANGES = {
    "flip": partial(images.flip, chance=1.0),
    "flip_vertical": partial(images.flip, chance=1.0, axis="vertical"),
    "crop": partial(images.crop, padding=3),
    "crop_smaller": partial(images.crop, size=(5, 7)),
    "resized_crop": partial(images.resized_crop, size=(9, 6)),
    "turn": images.turn,
    "rotate": images.rotate,
    "jitter": images.jitter,
    "cutout": images.cutout,
}


def image(dtype: Any = np.uint8, shape: tuple[int, ...] = (3, 12, 12)) -> Any:
    made = np.random.default_rng(1).integers(0, 256, shape)
    return made.astype(np.uint8) if dtype == np.uint8 else (made / 255).astype(dtype)


@pytest.mark.parametrize("name", CHANGES)
def test_kind_and_type_stay_and_nothing_is_written(name: str) -> None:
    for dtype in (np.uint8, np.float16, np.float32, np.float64):
        check_kind(CHANGES[name], dtype)


def check_kind(change: Any, dtype: Any) -> None:
    given = image(dtype)
    before = given.copy()
    given.flags.writeable = False
    of_array = change(given, sample_generator(0, 0, 5))
    assert isinstance(of_array, np.ndarray) and of_array.dtype == dtype
    assert of_array.flags.c_contiguous and of_array.shape[0] == 3
    of_tensor = change(torch.from_numpy(before), sample_generator(0, 0, 5))
    assert isinstance(of_tensor, torch.Tensor) and np.array_equal(of_tensor.numpy(), of_array)
    assert np.array_equal(given, before) and not np.array_equal(of_array, before)


def test_a_chance_is_no_percentage() -> None:
    with pytest.raises(UsageError, match=r"chance=50\. A chance is from 0 to 1"):
        images.flip(image(), sample_generator(0, 0, 0), chance=50)


def test_flip() -> None:
    given = image()
    found = images.flip(given, sample_generator(0, 0, 0), chance=1.0)
    assert np.array_equal(found, given[:, :, ::-1])
    assert images.flip(given, sample_generator(0, 0, 0), chance=0.0) is given
    flipped = [images.flip(given, sample_generator(0, 0, i)) is not given for i in range(400)]
    assert 150 < sum(flipped) < 250
    with pytest.raises(UsageError, match="horizontal or vertical"):
        images.flip(given, sample_generator(0, 0, 0), axis="diagonal")


def test_crop_is_a_part_of_the_padded_image() -> None:
    given = image() // 2 + 1
    padded = np.pad(given, ((0, 0), (2, 2), (2, 2)))
    parts = [padded[:, y : y + 12, x : x + 12] for y in range(5) for x in range(5)]
    seen = set()
    for index in range(200):
        found = images.crop(given, sample_generator(0, 0, index), padding=2)
        matches = [n for n, part in enumerate(parts) if np.array_equal(part, found)]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) == 25
    with pytest.raises(RecipeError, match="17 x 17 does not fit into 16 x 16"):
        images.crop(given, sample_generator(0, 0, 0), size=17, padding=2)


def test_resizing_keeps_what_is_flat_and_what_has_the_size() -> None:
    flat = np.full((3, 9, 7), 77, np.uint8)
    assert np.array_equal(images.resized(flat, 20, 4), np.full((3, 20, 4), 77))
    given = image(np.float32)
    assert np.array_equal(images.resized(given, 12, 12), given)
    ramp = np.arange(8.0).reshape(1, 1, 8)
    assert images.resized(ramp, 1, 4).reshape(-1).tolist() == [0.5, 2.5, 4.5, 6.5]
    found = images.resized_crop(
        given, sample_generator(0, 0, 0), size=12, area=(1.0, 1.0), ratio=(1, 1)
    )
    assert np.array_equal(found, given)
    with pytest.raises(UsageError, match="ranges above 0"):
        images.resized_crop(given, sample_generator(0, 0, 0), size=12, area=(0.0, 1.0))
    with pytest.raises(RecipeError, match="resized to 0 x 4"):
        images.resized(given, 0, 4)


def test_as_torch_resizes() -> None:
    given = image(np.float32, (3, 10, 17))
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(given)[None], (23, 8), mode="bilinear", align_corners=False
    )[0]
    np.testing.assert_allclose(images.resized(given, 23, 8), expected.numpy(), atol=1e-5)


def test_turn() -> None:
    given = image()
    found = [images.turn(given, sample_generator(0, 0, index)) for index in range(40)]
    for times in range(4):
        assert any(np.array_equal(part, np.rot90(given, times, (1, 2))) for part in found)
    wide = image(shape=(3, 4, 6))
    assert images.turn(wide, sample_generator(0, 0, 0), by=(180,)).shape == wide.shape
    with pytest.raises(RecipeError, match=r"by=\(0, 180\)"):
        images.turn(wide, sample_generator(0, 0, 0))
    with pytest.raises(UsageError, match="multiples of 90"):
        images.turn(wide, sample_generator(0, 0, 0), by=(45,))


def test_rotate_turns_about_the_middle() -> None:
    given = np.zeros((1, 21, 21), np.float32)
    given[0, 10, 10] = 1.0
    given[0, 10, 18] = 1.0
    for index in range(20):
        found = images.rotate(given, sample_generator(0, 0, index), degrees=30)
        assert abs(found[0, 10, 10] - 1) < 1e-6
        assert found[0, 9:12, 9:12].sum() < 1.4
        assert found[0, :, 15:].sum() > 0.8
    drawn = [
        images.rotate(given, sample_generator(0, 0, index), degrees=30)[0] for index in range(20)
    ]
    heights = [np.argmax(part[:, 15:].sum(axis=1)) for part in drawn]
    assert min(heights) < 9 and max(heights) > 11
    filled = images.rotate(np.ones((1, 8, 8)), sample_generator(0, 0, 0), degrees=45, fill=1)
    assert np.allclose(filled, 1)
    with pytest.raises(UsageError, match="up to 45"):
        images.rotate(given, sample_generator(0, 0, 0), degrees=90)


def test_jitter() -> None:
    given = image(np.float32)
    none = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0}
    same = images.jitter(given, sample_generator(0, 0, 0), **none)
    np.testing.assert_allclose(same, given, atol=1e-6)
    brighter = images.jitter(given, sample_generator(0, 0, 0), **{**none, "brightness": 0.5})
    inside = (brighter > 0) & (brighter < 1)
    factors = brighter[inside] / given[inside]
    assert np.allclose(factors, factors[0], rtol=1e-5) and abs(factors[0] - 1) > 0.01
    grey = np.repeat(image(np.float32, (1, 4, 4)), 3, axis=0)
    kept = images.jitter(grey, sample_generator(0, 0, 0), **{**none, "saturation": 1.0})
    np.testing.assert_allclose(kept, grey, atol=1e-5)
    for shape in ((1, 5, 5), (4, 5, 5)):
        assert images.jitter(image(shape=shape), sample_generator(0, 0, 0)).shape == shape
    with pytest.raises(RecipeError, match="needs 0 to 1"):
        images.jitter(given * 2 - 1, sample_generator(0, 0, 0))
    with pytest.raises(UsageError, match="from 0 to 1"):
        images.jitter(given, sample_generator(0, 0, 0), contrast=2.0)


def test_cutout() -> None:
    given = image() // 2 + 1
    counts = set()
    for index in range(50):
        found = images.cutout(given, sample_generator(0, 0, index), size=4)
        holes = (found == 0).all(axis=0)
        rows, columns = np.flatnonzero(holes.any(1)), np.flatnonzero(holes.any(0))
        assert holes[np.ix_(rows, columns)].all() and 4 <= holes.sum() <= 16
        assert np.array_equal(found[:, ~holes], given[:, ~holes])
        counts.add(int(holes.sum()))
    assert 16 in counts and len(counts) > 1


def test_standardize_and_to_float() -> None:
    given = image()
    floats = images.to_float(given)
    assert floats.dtype == np.float32 and floats.max() <= 1
    found = images.standardize(floats, mean=[0.5, 0.4, 0.3], std=[0.2, 0.2, 0.1])
    expected = (given / 255 - np.reshape([0.5, 0.4, 0.3], (3, 1, 1))) / np.reshape(
        [0.2, 0.2, 0.1], (3, 1, 1)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert images.standardize(given, mean=[1.0] * 3, std=[2.0] * 3).dtype == np.float32
    with pytest.raises(RecipeError, match="3 channels, and 1 means"):
        images.standardize(given, mean=[1.0], std=[1.0])
    with pytest.raises(UsageError, match="std above 0"):
        images.standardize(given, mean=[1.0], std=[0.0])


def test_channels() -> None:
    last = np.random.default_rng(0).integers(0, 9, (32, 20, 3)).astype(np.uint8)
    assert images.channels_first(last).shape == (3, 32, 20)
    assert images.channels_first(last[:, :, 0]).shape == (1, 32, 20)
    assert torch.equal(
        images.channels_first(torch.from_numpy(last)), torch.from_numpy(last).permute(2, 0, 1)
    )
    with pytest.raises(RecipeError, match="channels last"):
        images.flip(last, sample_generator(0, 0, 0), chance=1.0)
    with pytest.raises(RecipeError, match="2 or 3 dims"):
        images.channels_first(last[None])


@pytest.mark.parametrize("given", [np.zeros((4, 4)), np.zeros((3, 4, 4), np.int64), "x", None])
def test_what_is_no_image_is_refused(given: Any) -> None:
    with pytest.raises(RecipeError, match="is no image"):
        images.cutout(given, sample_generator(0, 0, 0))


def test_a_chain_of_them() -> None:
    change = chain(images.flip, partial(images.crop, padding=2), images.jitter, images.to_float)
    found = change(torch.from_numpy(image()), sample_generator(0, 0, 0))
    assert found.dtype == torch.float32 and found.shape == (3, 12, 12)
