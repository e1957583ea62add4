"""What a recording holds while it runs: one unit's activations, and not those of all."""

from functools import partial

import torch
from torch import Tensor, nn

from shoal.cost.pass_probe import LiveBytes
from shoal.numerics.storage_address import storage_address
from shoal.parallel.pipeline.stages import record
from shoal.parallel.pipeline.trackers import UnitTensor, UnitTensors

WIDTH, SAMPLES, DEPTH = 16, 1024, 8


class Deep(nn.Module):
    """Tensors that its backward would keep: one for each tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for _ in range(DEPTH):
            x = torch.tanh(x)
        return x


def test_activations_of_a_unit_end_with_it() -> None:
    model, size = nn.Sequential(*(Deep() for _ in range(6))), 4 * SAMPLES * WIDTH
    inputs = [torch.randn(SAMPLES, WIDTH) for _ in range(2)]
    for grows in (True, False):  # in training, and in an evaluation
        with torch.set_grad_enabled(grows), LiveBytes([*model.parameters(), *inputs]) as live:
            tape = record(model, [partial(model, x) for x in inputs], 2)
        assert [event.name for event in tape.events] == [*"012345"]
        assert live.peak < (DEPTH + 6) * size, "of six units with as many each"


def test_what_a_unit_made_is_known_as_long_as_it_is_there() -> None:
    found, made = UnitTensors(), UnitTensor(3, "unit")
    stored, given = torch.ones(8), torch.ones(8)
    view, where = given[2:], storage_address(stored)
    for tensor in (stored, view):
        found.add(tensor, made, [given])
    assert found.of_object(stored) == found.of_object(view) == found.at(where) == made
    assert found.of_object(given) is found.at(storage_address(given)) is None
    found.add(stored, UnitTensor(4, "later"), [])
    assert found.of_object(stored) == made, "the first to make it"
    handed_on = stored.detach()
    del stored
    assert found.at(where) == made and found.of_object(handed_on) is None
    del handed_on
    assert found.at(where) is None, "and what is put there next is not a unit's"
