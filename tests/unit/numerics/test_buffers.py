"""Buffers: every piece starts from the step's, and the mean is committed."""

import pytest
import torch
from torch import nn

from shoal.errors import RecipeError
from shoal.numerics.buffers import PieceBuffers, means_of


def norm() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(3)


def test_each_piece_starts_from_the_steps_buffers() -> None:
    model = norm()
    buffers = PieceBuffers(model)
    ends = []
    for _ in range(2):
        buffers.restore()
        model(torch.arange(12.0).reshape(4, 3))
        ends.append(buffers.end_piece())
    for first, second in zip(*ends, strict=True):
        assert first is not None and torch.equal(first, second)
    assert model.num_batches_tracked == 1


def test_the_mean_over_pieces_is_committed() -> None:
    model = norm()
    buffers = PieceBuffers(model)
    values = []
    for piece in range(2):
        buffers.restore()
        model(torch.randn(4, 3) + piece)
        values.append(buffers.end_piece())
    sums = [a + b for a, b in zip(*values, strict=True)]
    buffers.commit(means_of(sums, [2.0] * len(buffers)))
    expected = (values[0][0] + values[1][0]) / 2
    torch.testing.assert_close(model.running_mean.double(), expected, rtol=1e-6, atol=1e-7)
    assert model.num_batches_tracked == 1 and model.num_batches_tracked.dtype == torch.int64


def test_a_step_given_up_leaves_no_trace() -> None:
    model = norm()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = PieceBuffers(model)
    model(torch.randn(4, 3))
    buffers.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_did_not_change_is_none() -> None:
    model = norm().eval()
    buffers = PieceBuffers(model)
    model(torch.randn(4, 3))
    assert buffers.end_piece() == [None, None, None]
    assert means_of([None], [0.0]) == [None]


def test_a_buffer_that_a_forward_replaces_is_seen() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self) -> None:
            self.count = self.count + 1

    model = Counter()
    buffers = PieceBuffers(model)
    model()
    (value,) = buffers.end_piece()
    assert value == 1
    buffers.restore()
    assert model.count == 0


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angle", torch.zeros(2, dtype=torch.complex64))

    def forward(self, step: complex) -> None:
        self.angle += step


def test_complex_buffers_keep_both_parts() -> None:
    model = Turns()
    buffers = PieceBuffers(model)
    values = []
    for step in (1 + 2j, 3 + 4j):
        buffers.restore()
        model(step)
        values.append(buffers.end_piece())
    sums = [a + b for a, b in zip(*values, strict=True)]
    assert buffers.shapes() == [sums[0].shape]
    buffers.commit(means_of(sums, [2.0]))
    assert model.angle.tolist() == [2 + 3j, 2 + 3j]


def test_a_buffer_that_changes_its_shape_is_refused_by_name() -> None:
    model = norm()
    buffers = PieceBuffers(model)
    model.running_mean = torch.zeros(7)
    with pytest.raises(RecipeError, match=r"running_mean of BatchNorm1d went from \(3,\)"):
        buffers.end_piece()
