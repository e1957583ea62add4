"""Draws keyed by seed, step, piece and block."""

import itertools

import torch
from torch import nn

from shoal.numerics.randomness import PieceSeeds, blocks_in, derive_seed


def test_keys_differ_in_the_bits_that_count() -> None:
    places = list(itertools.product((0, 1, 7), range(40), range(8), range(6)))
    keys = {derive_seed(*place) for place in places}
    assert len(keys) == len(places)
    assert len({k & 0xFFFFFFFF for k in keys}) > len(places) - 5
    assert all(0 <= k < 2**63 for k in keys)


def test_blocks_are_the_members_of_the_outermost_lists() -> None:
    inner = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    model = nn.ModuleDict({"stem": nn.Linear(1, 1), "body": nn.ModuleList([inner, nn.ReLU()])})
    assert list(blocks_in(model)) == list(model["body"])
    assert list(blocks_in(nn.Linear(1, 1))) == []


def test_empty_places_and_the_inside_of_compiled_modules_are_no_blocks() -> None:
    first, last = nn.Dropout(), nn.Sequential(nn.ModuleList([nn.Dropout()]))
    model = nn.ModuleList([first, None, last])  # type: ignore[list-item]
    assert list(blocks_in(model)) == [first, last]
    PieceSeeds(model, seed=0).close()
    assert list(blocks_in(torch.compile(model, backend="eager"))) == []  # type: ignore[arg-type]
    model.compile(backend="eager")
    assert list(blocks_in(model)) == []


def masks(model: nn.Module, seeds: PieceSeeds, step: int, piece: int) -> torch.Tensor:
    seeds.enter(step, piece)
    out: torch.Tensor = model(torch.ones(1, 200))
    return out != 0


def test_a_piece_draws_the_same_whatever_came_before() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.2))
    seeds = PieceSeeds(model, seed=3)
    first = masks(model, seeds, 4, 1)
    for step, piece in ((4, 0), (5, 1), (0, 0)):
        torch.rand(7)
        assert not torch.equal(masks(model, seeds, step, piece), first)
    assert torch.equal(masks(model, seeds, 4, 1), first)
    seeds.close()


def test_a_block_need_not_know_what_an_earlier_one_drew() -> None:
    class Greedy(nn.Module):
        def __init__(self, num_draws: int):
            super().__init__()
            self.num_draws = num_draws

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.rand(self.num_draws)
            return x

    drawn = []
    for num_draws in (1, 1000):
        model = nn.Sequential(Greedy(num_draws), nn.Dropout(0.5))
        seeds = PieceSeeds(model, seed=0)
        drawn.append(masks(model, seeds, 1, 2))
        seeds.close()
    assert torch.equal(*drawn)


def test_close_takes_the_hooks_off() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    seeds = PieceSeeds(model, seed=0)
    seeds.close()
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
