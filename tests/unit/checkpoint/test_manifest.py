"""A manifest is consistent, or it is refused with the reason."""

import msgspec
import pytest

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.manifest import Chunk, FileEntry, Manifest, Origin, Progress, TensorEntry
from shoal.errors import BadCheckpoint

HASH = "0" * 32


def sound() -> dict:
    """Two files of one tensor, cut by rows, as plain JSON."""
    progress = Progress(step=20, samples=240, epoch=2, batch=0)
    origin = Origin("r.py:f", {}, "data=2", 2, 120, {})
    chunks = (Chunk((0, 0), (2, 3), 0, 16, HASH), Chunk((2, 0), (2, 3), 1, 16, HASH))
    files = (FileEntry("a.safetensors", 40, 16, HASH), FileEntry("b.safetensors", 40, 16, HASH))
    tensor = TensorEntry("model.w", "F32", (4, 3), chunks)
    empty = TensorEntry("model.e", "F32", (0, 3), ())
    made = Manifest(
        manifests.FORMAT, manifests.VERSION, progress, origin, {}, files, (tensor, empty)
    )
    return msgspec.json.decode(manifests.encode(made))


def read(content: dict) -> Manifest:
    encoded = msgspec.json.encode(content)
    return manifests.decode(encoded, manifests.seal(encoded))


def test_what_is_written_is_read() -> None:
    manifest = read(sound())
    assert manifest.progress.step == 20
    assert (
        manifests.decode(manifests.encode(manifest), manifests.seal(manifests.encode(manifest)))
        == manifest
    )


def test_every_byte_is_sealed() -> None:
    content = msgspec.json.encode(sound())
    sealed = manifests.seal(content)
    for at in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[at] ^= 1
        with pytest.raises(BadCheckpoint, match="was changed"):
            manifests.decode(bytes(flipped), sealed)
    for at in range(len(sealed)):
        flipped = bytearray(sealed)
        flipped[at] ^= 1
        with pytest.raises(BadCheckpoint, match="was changed"):
            manifests.decode(content, bytes(flipped))


def tensor(content: dict) -> dict:
    return content["tensors"][0]


def chunk(content: dict) -> dict:
    return tensor(content)["chunks"][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(format="pickle"), "format 'pickle'"),
        (lambda m: m.update(version=7), "version 7; this Shoal reads version 1"),
        (lambda m: m["files"][0].update(name="../a"), "not a plain name"),
        (lambda m: m["files"][0].update(name="/etc/passwd"), "not a plain name"),
        (lambda m: m["files"][0].update(name=".hidden"), "not a plain name"),
        (lambda m: m["files"][0].update(name="b.safetensors"), "listed twice"),
        (lambda m: m["files"][0].update(num_bytes=44), "end at byte 40, not 44"),
        (lambda m: m["files"][0].update(num_bytes=2**63), "end at byte 40"),
        (lambda m: m["files"][0].update(header_bytes=2**63), "belong to two chunks"),
        (lambda m: m["files"][0].update(header_bytes=-8), "bytes from 0 belong to no chunk"),
        (lambda m: m["files"][0].update(header_bytes=8), "bytes from 8 belong to no chunk"),
        (lambda m: m["files"][0].update(header_hash="xyz"), "is not a hash"),
        (lambda m: m["tensors"].append(m["tensors"][0]), "listed twice"),
        (lambda m: tensor(m).update(dtype="PICKLE"), "unknown type"),
        (lambda m: tensor(m).update(shape=[4, -3]), "impossible shape"),
        (lambda m: tensor(m).update(shape=[5, 3]), "do not cover [5, 3]"),
        (lambda m: tensor(m).update(shape=[3, 3]), "lies outside of [3, 3]"),
        (lambda m: chunk(m).update(offset=[2, 0]), "do not cover"),
        (lambda m: chunk(m).update(offset=[-1, 0]), "lies outside"),
        (lambda m: chunk(m).update(shape=[2**62, 4]), "lies outside"),
        (lambda m: chunk(m).update(offset=[0]), "lies outside"),
        (lambda m: chunk(m).update(file=2), "no file 2"),
        (lambda m: chunk(m).update(file=-1), "no file -1"),
        (lambda m: chunk(m).update(file=1), "end at byte 16, not 40"),
        (lambda m: chunk(m).update(start=12), "belong to two chunks"),
        (lambda m: chunk(m).update(start=18), "not aligned"),
        (lambda m: chunk(m).update(start="0"), "cannot be read"),
        (lambda m: chunk(m).update(hash="é" * 32), "not a hash"),
        (lambda m: m.pop("progress"), "cannot be read"),
    ],
)
def test_what_is_not_consistent_is_refused(change, words: str) -> None:
    content = sound()
    change(content)
    with pytest.raises(BadCheckpoint) as refused:
        read(content)
    assert words in str(refused.value)


def test_nonsense_is_refused() -> None:
    for content in (b"", b"{", b"[]", b"\x80\x04pickle", b"{}" * 1000):
        with pytest.raises(BadCheckpoint):
            manifests.decode(content, manifests.seal(content))
