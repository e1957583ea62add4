"""A recurrent network that learns how English is spoken: letters in, phonemes out.

    shoal train recipes/spelling.py:small
    shoal verify recipes/spelling.py:small --plan "data=2"

One GRU reads the word, a second one says it, told at each place what came before (teacher forcing).
Words differ in length, so the loss is a sum over true phonemes with their number as its weight:
padding counts nowhere, however the batch is cut.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
LONGEST = 12  # letters, and phonemes
PADDING, EDGE = 0, 1  # an edge ends a word, and stands before its first phoneme


class Speller(nn.Module):
    def __init__(self, phonemes: int, width: int):
        super().__init__()
        self.embed_letters = nn.Embedding(len(LETTERS) + 2, width, padding_idx=PADDING)
        self.embed_phonemes = nn.Embedding(phonemes, width, padding_idx=PADDING)
        self.read = nn.GRU(width, width, batch_first=True)
        self.say = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, phonemes)

    def forward(self, letters: Tensor, before: Tensor) -> Tensor:
        # Read backwards: padding first, and the start of the word freshest in mind.
        _, word = self.read(self.embed_letters(letters.flip(1)))
        said, _ = self.say(self.embed_phonemes(before), word)
        logits: Tensor = self.head(said)
        return logits


def loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum"
    )
    return total, (target != PADDING).sum()


def accuracy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Of the phonemes, with the true ones before them known."""
    true = target != PADDING
    return ((logits.argmax(dim=-1) == target) & true).sum(), true.sum()


def encode(rows: Iterable[Iterable[str]], symbols: Iterable[str]) -> Tensor:
    """Rows of symbols as numbers, an edge after each, padded: int64 [rows, LONGEST + 1]."""
    byte_of = {symbol: chr(number) for number, symbol in enumerate(symbols, start=EDGE + 1)}
    edge, padding = chr(EDGE), chr(PADDING)
    lines = ("".join([byte_of[s] for s in row]) + edge for row in rows)
    table = "".join(line.ljust(LONGEST + 1, padding) for line in lines).encode("ascii")
    return torch.from_numpy(np.frombuffer(table, np.uint8).reshape(-1, LONGEST + 1).astype(int))


def small(width: int = 128) -> shoal.Run:
    known = set(LETTERS)
    pairs = [
        (word, phonemes)
        for word, phonemes in shoal.data.catalog.spelling()
        if max(len(word), len(phonemes)) <= LONGEST and known.issuperset(word)
    ]
    symbols = sorted({phoneme for _, phonemes in pairs for phoneme in phonemes})
    letters = encode((word for word, _ in pairs), LETTERS)
    target = encode((phonemes for _, phonemes in pairs), symbols)
    before = F.pad(target[:, :-1], (1, 0), value=EDGE)
    held_out = torch.arange(len(pairs)) % 50 == 0

    def part(rows: Tensor) -> shoal.data.Source:
        return shoal.data.tensors((letters[rows], before[rows]), target[rows])

    return shoal.Run(
        model=lambda: Speller(len(symbols) + 2, width),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        schedule=shoal.schedules.cosine(warmup=20),
        clip=1.0,
        data=part(~held_out),
        evaluate=part(held_out),
        metrics={"accuracy": accuracy},
        batch_size=64,
        steps=400,
    )
