"""Gradients that workers pack on their way to servers (`codec`).

A worker packs each key of each of its rows before it pushes them; what is sent in frames is
shorter, and servers add up in the parameters' own type. Rows that servers read in shared memory are
what the packing leaves, since the result must not depend on where a server runs; there it costs two
passes over them and gains nothing. What comes back, the parameters, is not packed.

`fp16` and `bf16` round each element by a small part of it, and keep nothing of that. Of all others
a worker keeps what was dropped, row by row, and adds it to the next step's: staged until the step
is made, saved by replica, and shared out if the number of replicas changes, as in
`gradient_packing.py`. A key that a codec does not make smaller is pushed as it is.

Not for gradients beyond 65,504, which fp16 does not hold: a step that has one is refused, or, under
`precision=fp16`, done again with a smaller loss scale.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.compression import encode_with_residual
from shoal.comm.wire import tensor_of
from shoal.errors import RecipeError
from shoal.logs import warn_on_screen
from shoal.numerics.codecs import Codec, codec_at, make_codec
from shoal.parallel.layout import whole_slice
from shoal.sync.gradient_packing import REPLICAS, RESIDUAL, STEPS
from shoal.sync.replicas import replica_name
from shoal.sync.server.layout import ParameterKey, ServerLayout
from shoal.sync.state import ShardedState, StateSource

Row = tuple[int, int]  # a key, and a row of it


class PushedKey(NamedTuple):
    codec: str
    rows: list[Tensor]  # their bytes
    late: list[bool]  # by segment: whether something is in it that was not sent before


class GradientPacker:
    """`attach` comes first; for each attempt at a step `begin`, then `pack` for each key, in any
    order; `commit` if the step is made. `checks` says that servers look for non-finite values, and
    `scale` is the loss scale of now."""

    def __init__(
        self,
        name: str,
        checks: bool,
        num_steps: int = 0,
        scale: Callable[[], float] = lambda: 1.0,
    ):
        self.name, self._checks, self._num_steps, self._scale = name, checks, num_steps, scale
        self.steps = 0
        self._kept: dict[Row, Tensor] = {}
        self._staged: dict[Row, Tensor] = {}
        self.pushed: dict[int, PushedKey] = {}

    @property
    def codec(self) -> Codec:
        return codec_at(self.name, self.steps, self._num_steps)

    def attach(
        self,
        layout: ServerLayout,
        named: Sequence[tuple[str, nn.Parameter]],
        num_rows: int,
        place: tuple[int, int],
    ) -> None:
        """`place` is this replica's number, and how many there are."""
        self._layout, self._named, self._place = layout, named, place
        self._rows = [
            (number, row)
            for number, key in enumerate(layout.keys)
            for row in range(num_rows)
            if self.codec.keeps_residual and is_packed(self.name, key)
        ]
        if {*self._kept} - {*self._rows}:  # of another layout
            self._kept = {}

    def begin(self) -> None:
        """A new attempt at a step. What is frozen now has nothing more to be sent."""
        self._staged, self.pushed = {}, {}
        for (number, _), flat in self._kept.items():
            for s in self._layout.segments(number):
                if not self._named[s.parameter][1].requires_grad:
                    flat[s.place : s.place + s.length].zero_()

    def pack(self, number: int, rows: Sequence[Tensor]) -> None:
        """Let rows be what will arrive of them, and keep their bytes."""
        key, codec, scale = self._layout.keys[number], self.codec, self._scale()
        if not is_packed(self.name, key):
            return
        packed, segments = [], self._layout.segments(number)
        late = [False] * len(segments)
        for index, row in enumerate(rows):
            if not codec.keeps_residual:
                packed.append(codec.encode(row))
                self._round(codec, row, packed[-1])
                continue
            residual = self._kept.get((number, index))
            flat = row.float() if residual is None else row + residual * scale
            bytes_, dropped = encode_with_residual(codec, flat)
            packed.append(bytes_)
            row.copy_(flat - dropped)
            self._staged[number, index] = dropped / scale
            for place, s in enumerate(segments):
                late[place] |= bool(row[s.place : s.place + s.length].any())
        self.pushed[number] = PushedKey(codec.name, packed, late)

    def _round(self, codec: Codec, row: Tensor, packed: Tensor) -> None:
        came = codec.decode(packed, row.numel())
        if not self._checks and _overflows(row, came):
            raise RecipeError(
                f"A gradient is {float(row.abs().max()):.3g}, and codec={self.name} holds "
                f"{torch.finfo(torch.float16).max:,.0f} at the most. Use codec=bf16, or a "
                "loss that is smaller: a mean, not a sum."
            )
        row.copy_(came)

    def commit(self) -> None:
        self._kept |= self._staged
        self.begin()
        self.steps += 1

    @property
    def plain(self) -> dict[str, Any]:
        return {STEPS: self.steps, REPLICAS: self._place[1]}

    def state(self) -> ShardedState:
        """What is not sent yet, by replica, row and parameter."""
        tensors = {}
        for row in sorted({row for _, row in self._rows}):
            for (name, p), flat in zip(self._named, self._by_parameter(row), strict=True):
                key = replica_name(f"{RESIDUAL}{_mark(row)}{name}", self._place[0])
                tensors[key] = [whole_slice(flat.view(p.shape))]
        return ShardedState(tensors, self.plain)

    def load(self, source: StateSource, step: int) -> None:
        """A replica's own; of another number of replicas, an equal share of their sum."""
        self.begin()
        self._kept, self.steps = {}, int(source.plain.get(STEPS, step))
        own, count = self._place
        saved = int(source.plain.get(REPLICAS, 0))
        rows, is_same = sorted({row for _, row in self._rows}), saved == count
        for row in rows if is_same else rows[:1]:
            flats = [torch.zeros(p.numel()) for _, p in self._named]
            for (name, p), flat in zip(self._named, flats, strict=True):
                for key in self._saved_as(source, name, [own] if is_same else range(saved), row):
                    part = torch.zeros(p.shape)
                    source.fill(key, [whole_slice(part)])
                    flat += part.view(-1) if is_same else part.view(-1) / count
            self._keep(row, flats)

    def _saved_as(
        self, source: StateSource, name: str, replicas: Sequence[int], row: int
    ) -> list[str]:
        """Under which names it is found: this row's, or all rows' of other replicas."""
        marks = [_mark(row)] if len(replicas) == 1 else [_mark(n) for n in range(64)]
        keys = [replica_name(f"{RESIDUAL}{mark}{name}", r) for r in replicas for mark in marks]
        return [key for key in keys if key in source]

    def join(self, source: StateSource, step: int) -> None:
        """As `GradientPacking.join`."""
        theirs = int(source.plain.get(STEPS, step))
        if theirs == self.steps + 1 and {*self._staged} == {*self._rows}:
            self.commit()
        elif theirs != self.steps:
            self.begin()
            self._kept = {}
            if self._rows:
                warn_on_screen(
                    f"Replica {self._place[0]} continues from step {step} without what "
                    f"codec={self.name} had not sent of its gradients. The others keep theirs."
                )
        self.steps = theirs

    def _by_parameter(self, row: int) -> list[Tensor]:
        made = [torch.zeros(p.numel()) for _, p in self._named]
        for (number, of), flat in self._kept.items():
            for s in self._layout.segments(number) if of == row else ():
                made[s.parameter][s.start : s.stop] = flat[s.place : s.place + s.length]
        return made

    def _keep(self, row: int, flats: Sequence[Tensor]) -> None:
        for number, of in self._rows:
            if of == row:
                key = self._layout.keys[number]
                made = self._kept[number, row] = torch.zeros(key.stop - key.start)
                for s in self._layout.segments(number):
                    part = flats[s.parameter][s.start : s.stop]
                    made[s.place : s.place + s.length] = part


def _mark(row: int) -> str:
    return f"row{row}." if row else ""


def is_packed(name: str, key: ParameterKey) -> bool:
    """Whether a codec makes a key smaller."""
    return name != "none" and packed_bytes(name, key) < key.num_bytes


def packed_bytes(name: str, key: ParameterKey) -> int:
    codec = make_codec(name)
    return key.num_bytes if codec is None else codec.num_bytes(key.stop - key.start)


def unpack_row(name: str, frame: memoryview, values: Tensor) -> Tensor:
    """A row, as a codec of this name packed it, of a key that holds `values`."""
    if name == "none":
        return tensor_of(frame, values.dtype, values.numel())
    try:
        codec = make_codec(name)
    except (KeyError, ValueError):
        codec = None
    if codec is None:
        raise ValueError(f"rows are not packed by {name}")
    packed = tensor_of(frame, torch.uint8, codec.num_bytes(values.numel()))
    return codec.decode(packed, values.numel()).to(values.dtype)


def _overflows(row: Tensor, came: Tensor) -> bool:
    return not bool(came.isfinite().all()) and bool(row.isfinite().all())
