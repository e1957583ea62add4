"""Windows of local steps, brought together by servers.

To servers a window is a batch of which each replica has one piece, the gradient of the anchor:
what the replica's weights have moved away from it (`anchor.py`). So the clock, the journal and what
happens after deaths are those of any training through servers. In lockstep the outer optimizer
steps on the mean of all replicas; else each window is an update of its own, with its share of the
outer rate.

A codec packs what is pushed, key by key, and what it drops is added to the next window's push.

Cost: per worker and window the packed weights' bytes out and the weights' in; in its memory the
anchor, the row that is pushed and, with a codec, what is not sent yet. Read next: `local.py`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shoal.mesh import Asked, Mesh
from shoal.numerics.fragments import Timetable
from shoal.parallel.layout import Slice, whole
from shoal.sync.outer import RESIDUAL, Rule
from shoal.sync.server.anchor import Anchor, OuterSGD, OuterSource, anchor_of, outer_names
from shoal.sync.server.messages import Push, Stop, Welcome
from shoal.sync.server.strategy import ThroughServers
from shoal.sync.state import Source


class Windows(ThroughServers):
    """The outer side of a replica. Its `batch` is the number of the window."""

    def __init__(
        self,
        num_replicas: int,
        bound: int | None,
        rule: Rule,
        timetable: Timetable,
        *,
        damps: bool = False,
        rates: Sequence[float] = (),
        meets_after: Callable[[int], bool] = lambda step: True,
    ):
        self.rule, self.timetable = rule, timetable
        self._total = num_replicas if bound == 0 else 1  # terms of the sum that is stepped on
        self._packed: dict[int, Tensor] = {}  # what this window pushes, by key
        self._dropped: dict[int, Tensor] = {}  # of that
        self.residual: dict[int, Tensor] = {}  # what earlier windows dropped, by key
        super().__init__(
            num_replicas,
            bound,
            damps=damps,
            rates=rates,
            meets_after=lambda window: meets_after(self.last_step_before(window)),
        )

    def open(self, model: nn.Module, mesh: Mesh) -> None:
        """`attach`, with the anchor of a model."""
        if not hasattr(self, "anchor"):
            shared = anchor_of(model)
            self.weights: list[Tensor] = [p.detach() for p in shared.parameters()]
            own = {n: p.detach().clone() for n, p in shared.named_parameters()}
            self.anchor = Anchor(own)
            self.optimizer = OuterSGD(self.anchor.parameters(), self.rule, self._total)
        self.attach(self.anchor, self.optimizer, mesh)

    def window_of(self, step: int) -> int:
        """The window that a step belongs to. Steps count from 1, windows from 0."""
        return (step - 1) // self.timetable.local_steps

    def last_step_before(self, window: int) -> int:
        return min(window * self.timetable.local_steps, self.timetable.num_steps)

    @torch.no_grad()
    def agree(self, step: int) -> None:
        """Push what was learnt in the window that this step ends, and take the new anchor."""
        self.batch = self.window_of(step)
        is_short = step % self.timetable.local_steps != 0
        for group in self.optimizer.param_groups:
            # A window that the end cuts short is no gradient for the momentum: take the mean.
            group["lr"] = 1.0 if is_short else self.rule.rate
            group["momentum"] = 0.0 if is_short else self.rule.momentum
        self.microbatch(first=True, last=True)
        self._packed, self._dropped = {}, {}
        for p, weight in zip(self.parameters, self.weights, strict=True):
            p.grad = p - weight
        self.buckets.send_rest()
        if self.in_lockstep:
            list(self._read_sums(self._ask_sums(self._all_pieces, want_norm=False)))
        self.update(1.0, check=False)
        self.residual |= self._dropped
        self.take_anchor()

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Let the weights be the anchor."""
        torch._foreach_copy_(self.weights, list(self.anchor.parameters()))

    def ask_to_stop(self, step: int) -> Asked:
        """Let a server name a window after which all replicas stop."""
        self.batch = self.window_of(step)
        if self._halt is None:
            self.line.answer(self.line.ask(0, Stop, batch=self.batch))
        return self.stops_after(step)

    def stops_after(self, step: int) -> Asked:
        return self._asked_after(self.window_of(step) + 1)

    def outer_state(self, own: str) -> dict[str, list[Slice]]:
        """What servers hold beside the anchor, and what was not sent yet, with `own` before it."""
        fetched = self._served.fetch().tensors
        found = {outer_names(n): parts for n, parts in fetched.items() if n[:6] != "model."}
        for (name, p), flat in zip(self.named, self._residuals(), strict=True):
            if self.rule.codec is not None:
                found[own + RESIDUAL + name] = [whole(flat.view(p.shape))]
        return found

    @torch.no_grad()
    def load_outer(self, own: Source, mean: Source, step: int) -> None:
        """Take over the state after `step`: `own` is this replica's, `mean` that over all."""
        source = OuterSource(mean, self.anchor, self.rule, self._total)
        self.load_state_dict(source, self.window_of(step + 1))
        flats = self._residuals()
        for (name, p), flat in zip(self.named, flats, strict=True):
            if RESIDUAL + name in own:
                own.fill(RESIDUAL + name, [whole(flat.view(p.shape))])
        self.residual = {} if self.rule.codec is None else self._by_key(flats)

    def join(self, step: int) -> None:
        """As a newcomer: begin the window after `step` from the servers' anchor."""
        self.batch, self._attempt = self.window_of(step + 1), 0
        self._pull(self.batch, meets=False)
        self.take_anchor()

    def _where_to_begin(self, welcomes: list[Welcome]) -> int:
        """The first window of which not all servers have this replica's piece."""
        return min(welcome.next_batch for welcome in welcomes)

    def _push(self, key: int) -> None:
        codec = self.rule.codec
        if codec is None:
            super()._push(key)
            return
        own = self.layout.keys[key]
        if key not in self._packed:
            flat = self.buckets.buckets[own.shelf].rows[0][own.start : own.stop]
            flat = flat + self.residual.get(key, 0)  # in single precision at least
            self._packed[key] = codec.encode(flat)
            self._dropped[key] = flat - codec.decode(self._packed[key], flat.numel())
        self.line.tell(
            self.layout.holders[key],
            Push,
            [self._packed[key]],
            batch=self.batch,
            attempt=self._attempt,
            key=key,
            blocks=self.blocks,
            touched=[True] * len(self._segments[key]),
            is_shared=False,
            codec=codec.name,
        )

    def _residuals(self) -> list[Tensor]:
        """By parameter, flat."""
        made = [torch.zeros(p.numel(), dtype=_wide(p)) for p in self.parameters]
        for key, flat in self.residual.items():
            for s in self._segments[key]:
                made[s.parameter][s.start : s.stop] = flat[s.place : s.place + s.length]
        return made

    def _by_key(self, flats: Sequence[Tensor]) -> dict[int, Tensor]:
        made = {}
        for number, key in enumerate(self.layout.keys):
            segments = self._segments[number]
            made[number] = torch.zeros(
                key.stop - key.start, dtype=flats[segments[0].parameter].dtype
            )
            for s in segments:
                made[number][s.place : s.place + s.length] = flats[s.parameter][s.start : s.stop]
        return made


def _wide(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)
