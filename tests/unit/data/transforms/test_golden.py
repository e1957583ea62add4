"""Every augmentation gives the bits that were recorded, so a change of numpy or of ours is noticed.

Whoever changes one on purpose records it anew, and says in the changelog that samples will differ.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import xxhash

from shoal.data.packing import pack
from shoal.data.sources import Pass
from shoal.data.transforms import images, tabular, tokens
from shoal.data.transforms.mapping import mapped

BYTES = (np.arange(3 * 16 * 16) * 37 % 251).astype(np.uint8).reshape(3, 16, 16)
FLOATS = (BYTES / np.float32(255)).astype(np.float32)
ROW = (np.arange(32) % 7 / np.float32(7)).astype(np.float32)
TABLE = (np.arange(64 * 32) % 101 / np.float64(101)).reshape(64, 32)
TOKENS = np.arange(64) * 31 % 97

RECORDED: dict[str, tuple[Any, Any, str]] = {
    "flip": (images.flip, BYTES, "a3fd667cea43ff75"),
    "crop": (partial(images.crop, padding=4), BYTES, "1dad94708c585dbd"),
    "resized crop of bytes": (partial(images.resized_crop, size=8), BYTES, "8f330055f0dd1d67"),
    "resized crop of floats": (
        partial(images.resized_crop, size=(20, 9)),
        FLOATS,
        "1f052b555a294832",
    ),
    "turn": (images.turn, BYTES, "641fbc2c6e819adc"),
    "rotate bytes": (partial(images.rotate, degrees=20), BYTES, "84185895be80e519"),
    "rotate floats": (images.rotate, FLOATS, "8622ffbe7ec3bc1a"),
    "jitter bytes": (images.jitter, BYTES, "a8ed8c0060dc54a0"),
    "jitter floats": (images.jitter, FLOATS, "c7772d11a25b0c3c"),
    "cutout": (images.cutout, BYTES, "d0e15fbb6e68fc6f"),
    "standardize": (
        partial(images.standardize, mean=[0.1] * 3, std=[0.3] * 3),
        FLOATS,
        "2bb2ea470eefbedc",
    ),
    "drop tokens": (partial(tokens.drop, replacement=3), TOKENS, "0c020d95b28a6135"),
    "mask tokens": (partial(tokens.mask, mask=4, vocabulary=97), TOKENS, "d0c6e754c0cf89c5"),
    "span of tokens": (partial(tokens.span, length=20), TOKENS, "6896ef6336cdeec4"),
    "noise": (tabular.noise, ROW, "c6471fbce11d158f"),
    "drop features": (partial(tabular.drop, chance=0.3), ROW, "474221b2c96d7e93"),
    "swap features": (partial(tabular.swap, table=TABLE, chance=0.3), ROW, "2d4c6c6c52c9b00f"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_bits_are_those_that_were_recorded(name: str) -> None:
    change, value, recorded = RECORDED[name]
    source = mapped([value] * 8, change)
    hashed = xxhash.xxh3_64()
    for epoch in range(3):
        for index in range(8):
            of = Pass(2024, epoch)
            sample = source.vary(index, of) if source.draws else source[index]
            hashed.update(pack(sample))
    assert hashed.hexdigest() == recorded
