"""How the reference packs the gradients of replicas: a second implementation, on purpose.

One process plays all replicas: each adds up its pieces, adds what it did not send before, and
packs; the sum is packed again, unless `zero` leaves it with its owner. Only what defines the result
is shared with the strategies: how a codec rounds, in which tensors, what momentum it takes over.
Blocks belong to one tensor, so tensors are packed one by one here, without buckets and shares.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from shoal.data.split import share
from shoal.numerics.codecs import Codec, change_codec, codec_at, packs
from shoal.numerics.momentum import corrected_momenta, without_momentum
from shoal.numerics.optimizers import is_element_wise
from shoal.numerics.powersgd import first_factor, matrix_shape, orthonormal
from shoal.parallel.layout import Cut, blocks_of_rank, part_of
from shoal.plans.keys import HALF_CODECS
from shoal.plans.plan import Plan
from shoal.sync.gradient_packing import FACTOR, OWED, RESIDUAL, VELOCITY
from shoal.sync.replicas import replica_name
from shoal.sync.server.layout import make_layout
from shoal.training.run import Run
from shoal.verify.reference_outer import (
    RoundedPushes,
    Values,
    combine_gradients,
    tensor_cuts,
    tree_sum,
    tree_total,
)

UNSENT = "unsent"  # the kind of what a plan records of it
_Row = tuple[int, tuple[int, int]]  # of a key: its first piece, and how many


def records_unsent(plan: Plan) -> bool:
    """Whether steps are judged from what the plan had not sent: where ranks step on parts of
    tensors, last bits are others than a whole tensor's, and rounding makes steps of them."""
    return plan.packed_codec not in ("none", *HALF_CODECS) and (plan.tensor > 1 or plan.zero == 3)


class PackedTensor:
    """What replicas, and the owner of their sum, have not sent of one gradient."""

    def __init__(self, parameter: nn.Parameter, num_replicas: int):
        zeros = torch.zeros(parameter.numel())
        self.residuals = [zeros] * num_replicas
        self.velocities = [zeros] * num_replicas
        self.owed = zeros
        self.factor: Tensor | None = None  # of low rank


class PackedReplicas:
    """The replicas of a plan that packs gradients on every step."""

    def __init__(
        self,
        plan: Plan,
        num_steps: int,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        cuts: Mapping[str, Cut],
    ):
        """`cuts` are those of the tensor axis, by the parameter's name."""
        self.plan, self.num_steps, self.parameters = plan, num_steps, parameters
        self.names, self.cuts = names, [cuts.get(name) for name in names]
        self.momenta = corrected_momenta(plan.codec, optimizer)
        self.made = 0  # steps
        self.kept = {
            i: PackedTensor(p, plan.num_replicas)
            for i, p in enumerate(parameters)
            if packs(plan.codec, self._part_shape(i), p.itemsize)
        }
        self.staged = dict[int, PackedTensor]()
        self.optimizer, self.ahead = optimizer, dict[int, Tensor]()

    def put(self, recorded: Mapping[str, Tensor]) -> None:
        """Go on with what a plan had not sent, under the names of a checkpoint."""
        flat = {name: tensor.reshape(-1) for name, tensor in recorded.items()}
        for index in self.kept if flat else ():
            name, old = self.names[index], self.kept[index]
            made = self.kept[index] = PackedTensor(self.parameters[index], len(old.residuals))
            for kind, kept in ((RESIDUAL, made.residuals), (VELOCITY, made.velocities)):
                for replica, zeros in enumerate(kept):
                    kept[replica] = flat.get(replica_name(kind + name, replica), zeros)
            made.owed = flat.get(OWED + name, made.owed)
            made.factor = recorded.get(FACTOR + name, old.factor)

    def unsent(self) -> dict[str, Tensor]:
        """What a checkpoint has of it, where tensors are cut: there steps are judged from it."""
        if not records_unsent(self.plan):
            return {}
        found = {}
        for index, own in self.kept.items():
            name, p = self.names[index], self.parameters[index]
            for replica, residual in enumerate(own.residuals):
                found[replica_name(RESIDUAL + name, replica)] = residual.view(p.shape)
            for replica, velocity in enumerate(own.velocities if p in self.momenta else ()):
                found[replica_name(VELOCITY + name, replica)] = velocity.view(p.shape)
            if own.factor is not None:
                found[FACTOR + name] = own.factor
            elif not self.plan.zero:
                found[OWED + name] = own.owed.view(p.shape)
        return found

    @torch.no_grad()
    def step(self, step: Callable[[], object]) -> None:
        """Step; under `zero` on parameters that are ahead of what is sent of their changes, unless
        each rank holds nothing but its shard of them."""
        shards = self.plan.zero in (1, 2)
        seen = {i: self.parameters[i].detach().clone() for i in (self.kept if shards else ())}
        for i in seen:
            self.parameters[i].copy_(self.ahead.get(i, seen[i]))
        packed = {self.parameters[i] for i in self.kept} if self.momenta else set()
        with without_momentum(self.optimizer, packed) if packed else nullcontext():
            step()
        for i, before in seen.items():
            p, codec = self.parameters[i], change_codec(self.plan.codec)
            self.ahead[i] = p.detach().clone()
            change = (p - before).reshape(-1)
            came = codec.decode(codec.encode(change), change.numel())
            p.copy_(before.add_(came.view(p.shape)))
        self.kept, self.staged = self.kept | self.staged, {}
        self.made += 1

    def combined(self, piece: Callable[[int], Values], scale: float) -> Values:
        """The sums of a step, and those of the buffers after them, which are not packed."""
        self.staged = {}
        for i in [i for i in self.kept if not self.parameters[i].requires_grad]:
            factor = self.kept[i].factor
            self.kept[i] = PackedTensor(self.parameters[i], self.plan.num_replicas)
            self.kept[i].factor = factor
            self.ahead.pop(i, None)
        values = [piece(index) for index in range(self.plan.num_pieces)]
        count, size = len(self.parameters), self.plan.num_microbatches
        buffers = tree_sum(lambda index: values[index][count:], range(len(values)))
        gradients = [own[:count] for own in values]
        rounds = [
            tree_sum(gradients.__getitem__, range(first, first + size))
            for first in range(0, len(values), size)
        ]
        return [*self._gradients(rounds, scale), *buffers]

    def _gradients(self, rounds: Sequence[Values], scale: float) -> Values:
        n = self.plan.num_replicas
        own = [[rounds[k] for k in share(r, n, len(rounds))] for r in range(n)]
        if self.plan.zero < 2:
            return self._sums([_one_by_one(each, len(self.parameters)) for each in own], scale)
        nothing: Values = [None] * len(self.parameters)
        sent = [
            self._sums([each[k] if k < len(each) else nothing for each in own], scale)
            for k in range(max(map(len, own)))
        ]
        if self.plan.zero == 2:
            return tree_sum(sent.__getitem__, range(len(sent)))
        sums = list(_one_by_one(sent, len(self.parameters)))
        # FSDP2 leaves these whole: each replica adds up its own first.
        for index in [i for i, p in enumerate(self.parameters) if not p.dim()]:
            totals = [_one_by_one(each, len(self.parameters))[index] for each in own]
            sums[index] = self._sum(index, totals, scale)
        return sums

    def _sums(self, replicas: Sequence[Values], scale: float) -> Values:
        return [
            self._sum(index, [values[index] for values in replicas], scale)
            for index in range(len(self.parameters))
        ]

    def _sum(self, index: int, terms: Sequence[Tensor | None], scale: float) -> Tensor | None:
        p = self.parameters[index]
        is_touched = any(term is not None for term in terms)
        flat = [torch.zeros_like(p) if term is None else term for term in terms]
        if index not in self.kept:
            return tree_total(flat) if is_touched else None
        rows = [term.detach().reshape(-1).float() for term in flat]
        sum_ = self._packed_sum(index, rows, scale).view(p.shape).to(p.dtype)
        return sum_ if is_touched or bool(sum_.any()) else None

    def _packed_sum(self, index: int, rows: Sequence[Tensor], scale: float) -> Tensor:
        if self.plan.codec.startswith("powersgd:"):
            return self._low_rank_sum(index, rows, scale)
        codec = codec_at(self.plan.codec, self.made, self.num_steps)
        before, momentum = (
            self.staged.get(index, self.kept[index]),
            self.momenta.get(self.parameters[index]),
        )
        after = self.staged[index] = PackedTensor(self.parameters[index], len(rows))
        after.residuals, after.velocities, arrived = [], [], []
        for row, residual, velocity in zip(rows, before.residuals, before.velocities, strict=True):
            gradient = row / scale
            if momentum is not None:
                velocity, gradient = momentum.advance(velocity, gradient)
            whole = (gradient + residual) * scale
            came = self._coded(index, codec, whole)
            arrived.append(came)
            dropped = (whole - came) / scale if codec.keeps_residual else residual
            after.residuals.append(dropped)
            after.velocities.append(velocity.masked_fill(came != 0, 0.0))
        sum_ = tree_total(arrived)
        if self.plan.zero:
            return sum_
        whole = sum_ + before.owed * scale
        came = self._coded(index, codec, whole)
        after.owed = (whole - came) / scale if codec.keeps_residual else before.owed
        return came

    def _coded(self, index: int, codec: Codec, flat: Tensor) -> Tensor:
        """What comes of a vector; a part that a rank of the tensor axis holds is packed alone."""
        cut, shape, n = self.cuts[index], self.parameters[index].shape, self.plan.tensor
        if cut is None:
            return codec.decode(codec.encode(flat), flat.numel())
        whole, came = flat.view(shape), torch.empty(shape)
        for rank in range(n):
            part, at = part_of(whole, cut, rank, n), 0
            arrived = codec.decode(codec.encode(part.reshape(-1)), part.numel()).view(part.shape)
            for box in blocks_of_rank(shape, cut, rank, n):
                length = box.shape[cut.dim]
                box.of(came).copy_(arrived.narrow(cut.dim, at, length))
                at += length
        return came.view(-1)

    def _part_shape(self, index: int) -> tuple[int, ...]:
        """Of what a rank holds of a parameter."""
        cut, shape = self.cuts[index], [*self.parameters[index].shape]
        if cut is not None:
            shape[cut.dim] //= self.plan.tensor
        return tuple(shape)

    def _low_rank_sum(self, index: int, rows: Sequence[Tensor], scale: float) -> Tensor:
        before, shape = self.staged.get(index, self.kept[index]), self.parameters[index].shape
        rank = int(self.plan.codec.partition(":")[2])
        after = self.staged[index] = PackedTensor(self.parameters[index], len(rows))
        pairs = zip(rows, before.residuals, strict=True)
        whole = [((row / scale + residual) * scale) for row, residual in pairs]
        matrices = [flat.view(matrix_shape(tuple(shape))) for flat in whole]
        factor = first_factor(tuple(shape), rank) if before.factor is None else before.factor
        columns = orthonormal(tree_total([matrix @ factor for matrix in matrices]))
        after.factor = tree_total([matrix.T @ columns for matrix in matrices])
        sum_ = (columns @ after.factor.T).view(-1)
        after.residuals = [(flat - sum_ / len(rows)) / scale for flat in whole]
        return sum_


class PackedPushes(RoundedPushes):
    """Packs what workers push, key by key, and keeps what is dropped of each row."""

    def __init__(
        self,
        plan: Plan,
        num_steps: int,
        shares: Sequence[range],
        parameters: Sequence[nn.Parameter],
        may_cut: bool,
    ):
        super().__init__(plan.codec, shares, len(parameters))
        sizes = [(p.numel(), p.itemsize, p.dtype) for p in parameters]
        self.layout = make_layout(sizes, may_cut, plan.num_servers)
        self.parameters, self.plan, self.num_steps = parameters, plan, num_steps
        self.made, self.scale = 0, 1.0
        self.kept, self.staged = dict[_Row, Tensor](), dict[_Row, Tensor]()

    def begin(self, scale: float) -> None:
        self.staged, self.scale = {}, scale
        frozen = [i for i, p in enumerate(self.parameters) if not p.requires_grad]
        for (number, _), flat in self.kept.items():
            for s in self.layout.segments(number):
                if s.parameter in frozen:
                    flat[s.place : s.place + s.length] = 0.0

    def commit(self) -> None:
        self.kept |= self.staged
        self.made += 1

    def _pushed(self, row: tuple[int, int], gradients: Values) -> Values:
        codec, smallest = codec_at(self.plan.codec, self.made, self.num_steps), self._codec
        assert smallest is not None
        flats = [
            (torch.zeros_like(p) if g is None else g).reshape(-1).clone()
            for p, g in zip(self.parameters, gradients, strict=True)
        ]
        for number, key in enumerate(self.layout.keys):
            length = key.stop - key.start
            if smallest.num_bytes(length) >= key.num_bytes:
                continue
            segments, whole = self.layout.segments(number), torch.zeros(length)
            for s in segments:
                whole[s.place : s.place + s.length] = flats[s.parameter][s.start : s.stop]
            if (number, row) in self.kept:
                whole = whole + self.kept[number, row] * self.scale
            came = codec.decode(codec.encode(whole), length)
            self.staged[number, row] = (whole - came) / self.scale
            for s in segments:
                flats[s.parameter][s.start : s.stop] = came[s.place : s.place + s.length]
        return [
            None if g is None and not bool(flat.any()) else flat.view(p.shape)
            for p, g, flat in zip(self.parameters, gradients, flats, strict=True)
        ]


class PlainExchange:
    """Pieces that are added up as they are, or as they are pushed to servers (`arrived`)."""

    def __init__(
        self,
        plan: Plan,
        num_steps: int,
        pieces: range,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ):
        self.plan, self.pieces, self.num_gradients = plan, pieces, len(parameters)
        count = plan.num_apart if plan.sync == "server" else plan.num_replicas
        self.shares = [share(r, count, len(pieces)) for r in range(count)]
        # Out of lockstep a replica is one worker, whose pieces are a step of their own.
        pushed = self.shares if plan.staleness_bound == 0 else [range(len(pieces))]
        codec = plan.codec if plan.sync == "server" and plan.local_steps == 1 else "none"
        self.arrived = RoundedPushes(codec, pushed, self.num_gradients)
        if codec not in ("none", *HALF_CODECS):
            may_cut = is_element_wise(optimizer)
            self.arrived = PackedPushes(plan, num_steps, pushed, parameters, may_cut)

    def combined(self, piece: Callable[[int], Values], scale: float) -> Values:
        """The sum of the pieces, or the `combine` rule of the plan over replicas."""
        if isinstance(self.arrived, PackedPushes):
            self.arrived.begin(scale)
        if self.plan.combine == "mean":
            return tree_sum(piece, self.pieces, self.arrived)
        of_shares = functools.partial(tree_sum, piece)
        return combine_gradients(of_shares, self.shares, self.num_gradients, self.plan.combine)

    def step(self, step: Callable[[], object]) -> None:
        step()
        if isinstance(self.arrived, PackedPushes):
            self.arrived.commit()

    def unsent(self) -> dict[str, Tensor]:
        return {}  # each step is judged from what the reference had not sent


def make_exchange(
    run: Run, plan: Plan, pieces: range, model: nn.Module, optimizer: torch.optim.Optimizer
) -> PlainExchange | PackedReplicas:
    """How the replicas of a plan bring their pieces together."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and p.numel()}
    names, parameters = list(trained), list(trained.values())
    if plan.packed_codec != "none":
        cuts = tensor_cuts(run, plan) if plan.tensor > 1 else {}
        return PackedReplicas(plan, run.num_steps(), parameters, optimizer, names, cuts)
    return PlainExchange(plan, run.num_steps(), pieces, parameters, optimizer)


def _one_by_one(rounds: Sequence[Values], count: int) -> Values:
    """The sum of a replica's rounds, one after another."""
    total: Values = [None] * count
    for values in rounds:
        pairs = zip(total, values, strict=True)
        total = [b if a is None else a if b is None else a + b for a, b in pairs]
    return total
