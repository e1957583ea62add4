"""Samples as bytes: what is hostile in them is damage, and torch keeps its voice for others."""

import subprocess
import sys

import msgspec
import pytest
import torch

from shoal.data.packing import BadSample, pack, unpack
from shoal.errors import RecipeError


def packed(tree: object) -> bytes:
    header = msgspec.msgpack.encode(tree)
    return len(header).to_bytes(4, "little") + header


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_a_nesting_that_no_sample_has_is_damage(kind: str) -> None:
    for depth in (40, 400):
        tree: list[object] = ["list"]
        for _ in range(depth):
            tree = ["dict", "a", tree] if kind == "dict" else [kind, tree]
        with pytest.raises(BadSample, match="nested more than 32 deep"):
            unpack(packed(tree))


def test_what_may_be_packed_may_be_unpacked() -> None:
    sample: object = torch.arange(3)
    for _ in range(32):
        sample = [sample]
    found = unpack(bytes(pack(sample)))
    for _ in range(32):
        (found,) = found
    assert torch.equal(found, torch.arange(3))
    with pytest.raises(RecipeError, match="nested more than 32 deep"):
        pack([sample])


@pytest.mark.parametrize("sample", [2**70, "\ud800"])
def test_a_value_that_has_no_bytes_is_refused_in_a_sentence(sample: object) -> None:
    with pytest.raises(RecipeError, match="a sample cannot be packed"):
        pack(sample)


@pytest.mark.full
def test_torch_warns_of_what_others_do() -> None:
    """In a process that has read no sample; and reading one says nothing."""
    code = (
        "import warnings, torch\n"
        "from shoal.data.packing import pack, unpack\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    {first}\n"
        "print(len(told))\n"
    )
    for first, count in [
        ("torch.frombuffer(b'ab', dtype=torch.uint8)", 1),
        ("unpack(bytes(pack(torch.ones(2))))", 0),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", code.format(first=first)], capture_output=True, check=True
        )
        assert int(done.stdout) == count
