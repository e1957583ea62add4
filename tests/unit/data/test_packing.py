"""Samples as bytes: what is hostile in them is damage, and torch keeps its voice for others."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from shoal.data.packing import BadSample, pack, pack_parts, unpack
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


def test_parts_are_what_is_packed_and_their_arrays_the_samples_own() -> None:
    first, second = torch.arange(5, dtype=torch.int16), np.arange(3.0)
    sample = {"a": (first, 7), "b": second, "c": torch.zeros(2, dtype=torch.bfloat16)}
    parts = pack_parts(sample)
    assert b"".join(parts) == pack(sample)
    assert [len(part) for part in parts[1:]] == [10, 54, 24, 40, 4]
    first[0], second[0] = 300, 4.0
    assert b"".join(parts) == pack(sample)


def test_parts_of_tensors_that_lie_otherwise_are_in_order() -> None:
    turned = torch.arange(6).view(2, 3).T
    conjugate = torch.tensor([1 + 2j]).conj()
    for tensor in (turned, conjugate, torch.ones(3, requires_grad=True), torch.tensor(5)):
        found = unpack(pack(tensor))
        assert torch.equal(found, tensor.detach()) and found.shape == tensor.shape
