"""Images in folders: decoded, numbered by class, and named when they are bad."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data.readers.images import decode, images
from shoal.data.readers.records import BadRecord, SourceLost
from shoal.errors import UsageError
from shoal.testing.sources import Case, SourceConformance, same

Image = pytest.importorskip("PIL.Image", reason="needs the extra images")
COLOUR = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
GREY = np.arange(6, dtype=np.uint8).reshape(3, 2)


def encoded(pixels: Any, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, content in {
        "dog/1.png": encoded(COLOUR),
        "cat/deep/2.BMP": encoded(COLOUR + 1, "BMP"),
        "cat/1.png": encoded(GREY),
        "cat/.hidden.png": b"",
        "bird/1.tif": encoded(COLOUR + 2, "TIFF"),
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    return tmp_path


EXPECTED = [(COLOUR + 2, 0), (GREY, 1), (COLOUR + 1, 1), (COLOUR, 2)]


class TestImages(SourceConformance):
    @pytest.fixture
    def case(self, folder: Path) -> Case:
        return Case(lambda: images(folder), EXPECTED)


@pytest.mark.full
class TestImagesBehindAUrl(SourceConformance):
    @pytest.fixture
    def case(self, folder: Path, memory: Any) -> Case:
        memory.put(f"{folder}/", "/shoal-images/", recursive=True)
        return Case(lambda: images("memory://shoal-images"), EXPECTED)


def test_classes_are_sorted_and_can_be_given(folder: Path) -> None:
    assert images(folder).classes == ("bird", "cat", "dog")
    given = images(folder, classes=["ant", "bird", "cat", "dog"])
    assert [target for _, target in given] == [1, 2, 2, 3]
    with pytest.raises(UsageError, match=r"in dog, which is none .* Did you mean 'dogs'"):
        images(folder, classes=["bird", "cat", "dogs"])


@pytest.mark.parametrize(
    ("image", "shape"),
    [
        (Image.fromarray(COLOUR).convert("P"), (2, 3, 3)),
        (Image.fromarray(COLOUR).convert("RGBA"), (2, 3, 3)),
        (Image.fromarray(GREY).convert("1"), (3, 2)),
        (Image.fromarray(GREY).convert("LA"), (3, 2)),
    ],
)
def test_other_kinds_become_colour_or_grey(image: Any, shape: tuple[int, ...]) -> None:
    found = decode(encoded(image))
    assert found.shape == shape and found.dtype == np.uint8
    assert decode(encoded(image), "RGB").shape == (*shape[:2], 3)
    assert decode(encoded(image), "L").shape == shape[:2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is none of BMP, .* or was cut off"),
        (b"not an image at all", "it is none of BMP"),
        (encoded(COLOUR)[:-30], "cannot be decoded"),
        (encoded(np.zeros((4, 4), np.uint16)), "a byte cannot hold"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is none of BMP"),
    ],
    ids=["empty", "text", "cut", "deep", "program"],
)
def test_a_corrupt_image_is_named_and_the_others_are_read(
    folder: Path, content: bytes, said: str
) -> None:
    (folder / "cat/1.png").write_bytes(content)
    source = images(folder)
    with pytest.raises(BadRecord, match=rf"cat/1.png \(sample 1\): .*{said}"):
        source[1]
    assert same(source[2], EXPECTED[2])


def test_a_bomb_is_refused_before_it_is_decoded(folder: Path) -> None:
    (folder / "cat/1.png").write_bytes(encoded(Image.new("1", (3000, 2000))))
    with pytest.raises(BadRecord, match=r"3000 x 2000 pixels, and 1,000,000 are allowed"):
        images(folder, most_pixels=1_000_000)[1]
    assert len(images(folder, most_pixels=178_956_970)) == 4
    with pytest.raises(UsageError, match=r"Pillow decodes up to 178,956,970; use that or less"):
        images(folder, most_pixels=178_956_971)


def test_a_changed_or_missing_image_is_lost(folder: Path) -> None:
    source = images(folder)
    before = source.identity()
    os.utime(folder / "cat/1.png", ns=(0, 0))
    with pytest.raises(SourceLost, match=r"cat/1.png changed"):
        source[1]
    assert images(folder).identity() != before
    (folder / "cat/1.png").unlink()
    with pytest.raises(SourceLost, match=r"cat/1.png cannot be opened any more"):
        source[1]
    assert same(source[0], EXPECTED[0])


def test_folders_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="cannot be listed"):
        images(folder / "missing")
    with pytest.raises(UsageError, match="does not exist"):
        images("memory://shoal-missing/x")
    with pytest.raises(UsageError, match="mode="):
        images(folder, mode="CMYK")  # type: ignore[arg-type]
    (folder / "cat/notes.txt").touch()
    assert len(images(folder)) == 4 and "1 files are no images" in caplog.text
    (folder / "loop").symlink_to(folder)
    with pytest.raises(UsageError, match="loop is a link to a folder that it lies in"):
        images(folder)
    (folder / "loop").unlink()
    (folder / "stray.png").touch()
    with pytest.raises(UsageError, match=r"1 images outside of a class, as stray.png"):
        images(folder)


def test_an_empty_folder_has_no_samples(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert len(images(tmp_path / "empty")) == 0


def test_want_of_memory_is_no_fault_of_an_image(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under quarantine, such a sample would be left out for good."""

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(MemoryError):
        images(folder)[0]
