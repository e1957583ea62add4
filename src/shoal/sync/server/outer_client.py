"""Windows of local steps, averaged by servers: the outer side of a replica.

To servers a window is a batch of which each replica has one piece, the gradient of the anchor: the
difference between anchor and weights (`anchor.py`). So clock, journal and recovery are those of any
training through servers. In lockstep the outer optimizer steps on the mean of all replicas; else
each window is an update of its own, with its share of the outer rate.

A codec packs what is pushed, key by key, and the rounding error is added to the next window's push.

With a deadline a round of windows may close without this replica (`deadline.py`). Then its push has
no effect: the weights move by as much as the anchor has, so the progress since its last round is
still the difference, and goes into the next one.

Cost: per worker and window the packed weights' bytes out and the weights' in; in its memory the
anchor, the row that is pushed and, with a codec, what is not sent yet. Read next: `local.py`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.compression import encode_with_residual, zero_ranges
from shoal.comm.mesh import Mesh, RankRequests
from shoal.faults import faultpoint
from shoal.numerics.codecs import make_codec
from shoal.numerics.fragments import FragmentSchedule
from shoal.parallel.layout import LocalLayout, Slice, slices_of
from shoal.sync.costs import Amount, Message
from shoal.sync.outer import RESIDUAL, OuterConfig, wide_bytes
from shoal.sync.rank_layout import RankLayout
from shoal.sync.server.anchor import Anchor, OuterSGD, OuterSource, outer_name
from shoal.sync.server.costs import layout_on_servers
from shoal.sync.server.messages import CheckRows, JoinRound, Push, RoundClosed
from shoal.sync.server.parts import line_of
from shoal.sync.server.shard import ChangedSettings
from shoal.sync.server.strategy import ServerStrategy, WorkerOptions
from shoal.sync.state import StateSource


class OuterClient(ServerStrategy):
    """The outer side of a replica. Its `batch` is the number of the window."""

    streams = False  # the anchor is looked at as soon as it is here

    def __init__(
        self,
        bound: int | None,
        rule: OuterConfig,
        timetable: FragmentSchedule,
        options: WorkerOptions,
        closes_early: bool = False,
    ):
        """`options` speak of steps, and a server of windows."""
        self.rule, self.timetable, self.closes_early = rule, timetable, closes_early
        self.last_round: RoundClosed | None = None  # that was heard of
        self._packed: dict[int, Tensor] = {}  # what this window pushes, by key
        self._dropped: dict[int, Tensor] = {}  # of that
        self.residual: dict[int, Tensor] = {}  # what earlier windows dropped, by key
        super().__init__(
            1,  # piece of each replica, of whom there are as many as `open` says
            bound,
            options._replace(
                meets_after=lambda window: options.meets_after(self.last_step_before(window))
            ),
        )

    def open(self, weights: Mapping[str, Tensor], mesh: Mesh, holding: LocalLayout) -> None:
        """`attach`, with the anchor of these weights: what this rank holds of the model, of which
        some of the servers have the anchor."""
        if not hasattr(self, "anchor"):
            self.weights = [*weights.values()]
            self.anchor = Anchor({name: p.clone() for name, p in weights.items()})
            self.optimizer = OuterSGD(self.anchor.parameters(), self.rule)
            # Out of lockstep a fast replica's last window, a short one, comes before others' long.
            self._settings = ChangedSettings(self.optimizer, always=("lr", "momentum"))
        self.num_pieces = self.num_rounds = mesh.peers.num_ranks
        self.attach(self.anchor, self.optimizer, line_of(mesh), holding)

    def window_of(self, step: int) -> int:
        """The window that a step belongs to. Steps count from 1, windows from 0."""
        return (step - 1) // self.timetable.local_steps

    def last_step_before(self, window: int) -> int:
        return min(window * self.timetable.local_steps, self.timetable.num_steps)

    @torch.no_grad()
    def agree(self, step: int) -> None:
        """Push the progress up to the end of a window, and take the new anchor."""
        self.push_window(step)
        if self.in_lockstep:
            list(self._read_sums(self._ask_sums(self._all_pieces, want_norm=False)))
        self._take_anchor()

    @torch.no_grad()
    def push_window(self, step: int) -> None:
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

    def _take_anchor(self) -> None:
        self.update(1.0, check=False)
        self.residual |= self._dropped
        self.load_anchor()

    def check_rows(self, first: int) -> None:
        """Wait until all servers from the `first` on have the rows: a replica in a round may stop
        for a while without delaying others."""
        self._requests.answers(
            [
                self._requests.ask(server, CheckRows, **self._attempted)
                for server in range(first, len(self.client))
            ]
        )

    def join_round(self, num_samples: int, mark: int) -> RoundClosed:
        """Wait until the round is closed, which the first server of all decides on. All others
        have the rows by then."""
        brought = {"num_samples": num_samples, "mark": mark}
        waits = self.halts.meets_after(self.batch + 1)
        asked = self._requests.ask(0, JoinRound, **self._attempted, **brought, waits=waits)
        joined: RoundClosed = self._requests.answers([asked])[0][0]
        return joined

    @torch.no_grad()
    def follow(self, joined: RoundClosed) -> None:
        """Take what the servers of this part made of the round. If it closed without this replica,
        nothing counts of what it brought: its weights move as the anchor has moved, so that what
        they are away from it stays."""
        if joined.counts and joined.is_in:
            self._counts = joined.counts
            self._take_anchor()
            return
        before = [p.detach().clone() for p in self.parameters]
        # What it is in was long stepped on.
        self._pull(self.batch + 1, joined.is_in and self.halts.meets_after(self.batch + 1))
        self._advance_to(self.batch + 1)
        if joined.is_in:
            self.residual |= self._dropped
            self.load_anchor()
            return
        for weight, p, old in zip(self.weights, self.parameters, before, strict=True):
            weight.add_(p - old)

    @property
    def _attempted(self) -> dict[str, int]:
        return {"batch": self.batch, "attempt": self._attempt}

    @torch.no_grad()
    def load_anchor(self) -> None:
        """Let the weights be the anchor."""
        for weight, value in zip(self.weights, self.anchor.parameters(), strict=True):
            weight.copy_(value)

    def requests_after(self, step: int, asked: RankRequests, replica: Group) -> RankRequests:
        """Whether all stop or meet after this end of a window. Every rank of a replica calls it."""
        self.batch = self.window_of(step)
        return self.requests_of_all(replica, self.batch, asked)

    def outer_state(self, own: str) -> dict[str, list[Slice]]:
        """What servers hold beside the anchor, and what was not sent yet, with `own` before it."""
        fetched = self._served.fetch().tensors
        found = {outer_name(n): parts for n, parts in fetched.items() if n[:6] != "model."}
        for (name, p), flat in zip(self.named, self._residuals(), strict=True):
            if self.rule.codec is not None:
                found[own + RESIDUAL + name] = slices_of(name, flat.view(p.shape), self.holding)
        return found

    @torch.no_grad()
    def load_outer(self, own: StateSource, mean: StateSource, step: int) -> None:
        """Take over the state after `step`: `own` is this replica's, `mean` that over all."""
        source = OuterSource(mean, self.anchor, self.rule)
        self.load_state_dict(source, self.window_of(step + 1))
        flats = self._residuals()
        for (name, p), flat in zip(self.named, flats, strict=True):
            if RESIDUAL + name in own:
                own.fill(RESIDUAL + name, slices_of(name, flat.view(p.shape), self.holding))
        self.residual = {} if self.rule.codec is None else self._by_key(flats)

    def begin_after(self, step: int) -> None:
        """As a newcomer: begin the window after `step` from the servers' anchor."""
        self.batch, self._attempt = self.window_of(step + 1), 0
        faultpoint("local.joining", step)
        self._pull(self.batch, meets=False, waits=False)
        self.load_anchor()

    def wait_for_turn(self) -> None:
        was_early = self._is_early
        super().wait_for_turn()
        if was_early:
            self.load_anchor()

    def newcomer_step(self) -> int:
        """The first window of which not all servers have this replica's piece."""
        return min(welcome.next_batch for welcome in self._welcomes)

    def _push(self, key: int) -> None:
        codec = self.rule.codec
        if codec is None:
            super()._push(key)
            return
        own = self.layout.keys[key]
        if key not in self._packed:
            flat = self.buckets.buckets[own.flat_buffer].rows[0][own.start : own.stop]
            flat = flat + self.residual.get(key, 0)  # in single precision at least
            self._packed[key], self._dropped[key] = encode_with_residual(codec, flat)
            zero_ranges(self._dropped[key], self.layout.padding(key))
        self.client.send(
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


def push_message(layout: RankLayout, what: str) -> Message:
    """What a replica sends of a window, a message for each key."""
    codec, keys = make_codec(layout.plan.codec), layout_on_servers(layout).keys
    sizes = [
        key.num_bytes if codec is None else codec.num_bytes(key.stop - key.start) for key in keys
    ]
    return Message(what, "servers", "push", len(keys), sum(sizes))


def pushed_memory(layout: RankLayout) -> Amount:
    """What a replica holds beside its weights and its own optimizer's state."""
    words = ["the anchor", "what is pushed"]
    num_bytes = sum(p.num_bytes for p in layout.trained if p.dtype.is_floating_point)
    num_bytes += layout_on_servers(layout).row_places(1)[-1]
    if layout.plan.codec != "none":
        words.append("what packing dropped")
        num_bytes += wide_bytes(layout)
    return Amount(num_bytes, ", ".join(words))
