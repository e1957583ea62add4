"""Images that a run logs: forms that are accepted, files that other programs read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import UsageError
from shoal.events.images import MOST_FILES, as_pixels, encode_png, write_image

Image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_file_has_the_pixels(tmp_path: Path, channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    path = tmp_path / "image.png"
    path.write_bytes(encode_png(pixels))
    found = np.asarray(Image.open(path))
    assert np.array_equal(found if channels > 1 else found[:, :, None], pixels)


@pytest.mark.parametrize(
    ("image", "shape"),
    [
        (torch.rand(4, 6), (4, 6, 1)),
        (torch.rand(3, 8, 6), (8, 6, 3)),
        (np.zeros((8, 6, 3)), (8, 6, 3)),
        (torch.zeros(1, 2, 2, dtype=torch.bool), (2, 2, 1)),
        (torch.rand(3, 8, 6, dtype=torch.bfloat16, requires_grad=True), (8, 6, 3)),
    ],
)
def test_forms_that_people_have(image: Any, shape: tuple[int, ...]) -> None:
    assert as_pixels("x", image).shape == shape


def test_numbers_from_0_to_1_are_bytes_and_others_stay() -> None:
    found = as_pixels("x", torch.tensor([[0.0, 0.5], [1.0, 7.0], [float("nan"), -1.0]]))
    assert found[:, :, 0].tolist() == [[0, 128], [255, 255], [0, 0]]
    assert as_pixels("x", torch.tensor([[3, 300]]))[:, :, 0].tolist() == [[3, 255]]


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (torch.rand(5), "shape .5."),
        (torch.rand(2, 5, 5), "shape .2, 5, 5."),
        (torch.rand(0, 5), "shape .0, 5."),
        (np.zeros((3000, 2)), "2 x 3000 pixels"),
        (np.array([["a"]]), "takes numbers"),
    ],
)
def test_what_is_no_image_is_refused(image: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        as_pixels("x", image)


def test_one_rank_writes_and_old_files_go(tmp_path: Path) -> None:
    place = write_image(tmp_path / "images", "a/../b", 1, torch.rand(2, 2), writes=False)
    assert not (tmp_path / "images").exists()
    for step in range(1, MOST_FILES + 4):
        assert write_image(tmp_path / "images", "a/../b", step, torch.rand(2, 2), writes=True)
    (folder,) = (tmp_path / "images").iterdir()
    assert len(list(folder.iterdir())) == MOST_FILES
    assert not (tmp_path / place).exists() and (folder / f"step-{MOST_FILES + 3:08d}.png").exists()
