"""Tests that every strategy must pass, on real ranks.

    def make(num_pieces: int) -> Strategy:
        return AllReduce(num_pieces)

    class TestAllReduce(StrategyConformance):
        @pytest.fixture
        def factory(self):
            return make

A new strategy gives that one fixture, a function of a module, and inherits the tests. They drive
it as the trainer does, on a small network with everything that goes wrong easily: dropout,
BatchNorm, a parameter that is never used, one that a single piece uses, a frozen one and tied
weights. `plan` are the plan keys that its `costs` go by; what it declares is held against what a
real step sends. The fixture `pool` (`shoal.testing.ranks`) must be there. Cost: some 100 ms a test.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.data.split import share
from shoal.numerics.buffers import PieceBuffers
from shoal.numerics.randomness import PieceSeeds
from shoal.parallel.apply import Survey
from shoal.parallel.boxes import Box
from shoal.parallel.layout import Slice
from shoal.plans.plan import Plan
from shoal.sync.allreduce import AllReduce
from shoal.sync.choose import num_stepped, settled
from shoal.sync.local import LocalSGD
from shoal.sync.rank_layout import ModelParameter, PlanFacts, RankLayout, StateTensor
from shoal.sync.state import MemorySource, ShardedState
from shoal.sync.strategy import GlobalStep, LocalStep, Strategy
from shoal.testing.ranks import Pool, import_function, importable_name

EVEN = (4, 4, 4, 4, 4, 4)
UNEVEN = (4, 2, 5, 3, 6, 2)
WITH_EMPTY = (4, 3, 5, 2, 4, 0)  # as the last batch of an epoch may be
RARE_PIECE = 2  # the only one to use the parameter `rare`
NUM_STEPS = 6
WIDTH = 40  # of matrices that a codec packs

Factory = Callable[[int], Strategy]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.blocks[1].weight  # type: ignore[assignment]
        self.head = nn.Linear(WIDTH, 1)
        self.unused = nn.Parameter(torch.ones(3, WIDTH, WIDTH))
        self.rare = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)

    def forward(self, x: Tensor, with_rare: bool) -> Tensor:
        x = F.relu(self.norm(self.blocks[0](x)))
        x = F.dropout(self.blocks[1](x), 0.3, self.training)
        x = self.tied(F.relu(x)) * self.frozen
        out: Tensor = self.head(x * self.rare.diagonal() if with_rare else x)
        return out


class Interrupted(Exception):
    """What a test raises in the middle of a step."""


class Drive:
    """Does with a strategy what the trainer does, step by step."""

    def __init__(self, mesh: Mesh, factory: str, sizes: Sequence[int], seed: int = 1):
        torch.manual_seed(seed)
        self.sizes = sizes
        self.model = Network()
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1, fused=True)
        self.seeds = PieceSeeds(self.model, seed=0)
        self.strategy: Strategy = import_function(factory)(len(sizes))
        apart = isinstance(self.strategy, LocalSGD) and mesh.num_ranks > 1
        self.mesh = mesh.with_replicas(mesh.num_ranks) if apart else mesh
        self.attach()
        self.losses: list[float] = []

    def attach(self) -> None:
        self.strategy.attach(self.model, self.optimizer, self.mesh)
        settled(self.strategy)
        self.own = share(self.mesh.rank, self.mesh.num_ranks, len(self.sizes))

    def step(self, step: int, poison: float = 1.0) -> bool:
        agreed = self.exchange(step, poison)
        took = self.strategy.update(sum(self.sizes) / agreed.weight)
        if took:
            self.losses.append(agreed.loss)
        return took

    def exchange(self, step: int, poison: float = 1.0) -> GlobalStep:
        return self.strategy.exchange(self.compute(step, poison), want_norm=True)

    def compute(self, step: int, poison: float = 1.0, stop_at: int | None = None) -> LocalStep:
        """Forward and backward of this rank's pieces; raises within the piece `stop_at` of them."""
        tally = LocalStep()
        for index in self.own:
            with self.strategy.microbatch(
                first=index == self.own.start, last=index == self.own.stop - 1
            ):
                loss = self._piece(step, index, poison)
                if stop_at == index - self.own.start:
                    raise Interrupted
            tally.losses.append(loss)
            tally.weights.append(float(self.sizes[index]))
        return tally

    def state(self) -> dict[str, Tensor]:
        """A copy of everything the strategy would hand to a newcomer."""
        state = self.strategy.state_dict()
        plain = bytearray(msgspec.msgpack.encode(state.plain, order="deterministic"))
        copies = {
            _key(name, part): part.tensor.clone()
            for name, parts in state.tensors.items()
            for part in parts
        }
        return copies | {_PLAIN: torch.frombuffer(plain, dtype=torch.uint8)}

    def load(self, state: dict[str, Tensor], step: int) -> None:
        plain = msgspec.msgpack.decode(state[_PLAIN].numpy().tobytes())
        tensors: dict[str, list[Slice]] = {}
        for key, tensor in state.items():
            if key != _PLAIN:
                name, whole, offset = _read(key)
                tensors.setdefault(name, []).append(Slice(tensor, whole, offset))
        self.strategy.load_state_dict(MemorySource(ShardedState(tensors, plain)), step)
        settled(self.strategy)

    def report(self) -> dict[str, Any]:
        self.strategy.detach()
        self.seeds.close()
        return {"losses": self.losses, "state": self.state()}

    def _piece(self, step: int, index: int, poison: float) -> Tensor:
        size = self.sizes[index]
        if not size:
            return torch.zeros(())
        draws = torch.Generator().manual_seed(1000 * step + index)
        inputs = torch.randn(size, 6, generator=draws)
        target = torch.randn(size, 1, generator=draws)
        self.seeds.enter(step, index)
        output = self.model(inputs, index == RARE_PIECE)
        loss = F.mse_loss(output, target)
        (loss * poison * size / sum(self.sizes)).backward()
        return loss.detach()


_PLAIN = "plain"


def _key(name: str, part: Slice) -> str:
    """A name for a part of a tensor, with its place in it."""
    return msgspec.json.encode([name, part.global_shape, part.offset]).decode()


def _read(key: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return msgspec.json.decode(key, type=tuple[str, tuple[int, ...], tuple[int, ...]])


def _assembled(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors that several ranks hold parts of; what none holds is NaN."""
    whole: dict[str, Tensor] = {}
    for state in states:
        for key, part in state.items():
            if key == _PLAIN:
                continue
            name, shape, offset = _read(key)
            if name not in whole:
                whole[name] = torch.zeros(shape, dtype=torch.float64).fill_(torch.nan)
            Box(offset, tuple(part.shape)).of(whole[name]).copy_(part)
    return whole


def _undisturbed(mesh: Mesh, factory: str, sizes: Sequence[int]) -> dict[str, Any]:
    drive = Drive(mesh, factory, sizes)
    for step in range(NUM_STEPS):
        assert drive.step(step)
    return drive.report()


def _attached_again(mesh: Mesh, factory: str, sizes: Sequence[int]) -> dict[str, Any]:
    drive = Drive(mesh, factory, sizes)
    for step in range(NUM_STEPS):
        assert drive.step(step)
        drive.strategy.detach()
        drive.attach()
    return drive.report()


def _moved(mesh: Mesh, factory: str, sizes: Sequence[int], at_step: int) -> dict[str, Any]:
    first = Drive(mesh, factory, sizes)
    for step in range(at_step):
        first.step(step)
    losses = first.losses
    state = first.report()["state"]
    second = Drive(mesh, factory, sizes, seed=2)
    second.load(state, at_step)
    for step in range(at_step, NUM_STEPS):
        assert second.step(step)
    return second.report() | {"losses": losses + second.losses}


def _poisoned(mesh: Mesh, factory: str, sizes: Sequence[int], everywhere: bool) -> dict[str, Any]:
    drive = Drive(mesh, factory, sizes)
    bad = everywhere or mesh.rank == mesh.num_ranks - 1
    for step in range(NUM_STEPS):
        if step == 3:
            before = drive.state()
            assert not drive.step(step, poison=float("inf") if bad else 1.0)
            after = drive.state()
            assert before.keys() == after.keys()
            changed = [name for name in before if not torch.equal(before[name], after[name])]
            assert not changed, f"a step that was not made changed {', '.join(changed)}"
        assert drive.step(step)
    return drive.report()


def _aborted(mesh: Mesh, factory: str, sizes: Sequence[int], regroup: bool) -> dict[str, Any]:
    drive = Drive(mesh, factory, sizes)
    for step in range(NUM_STEPS):
        if step in (0, 3):
            stop_at = len(drive.own) - 1 if regroup else 0
            with pytest.raises(Interrupted):
                drive.compute(step, stop_at=stop_at)
            if regroup:
                drive.strategy.detach()
                drive.attach()
        assert drive.step(step)
    return drive.report()


def _gradients(mesh: Mesh, factory: str, sizes: Sequence[int]) -> list[str]:
    drive = Drive(mesh, factory, sizes)
    drive.step(0)
    drive.exchange(1)
    found = list(drive.strategy.gradients())
    drive.strategy.detach()
    return found


def _costs(mesh: Mesh, factory: str, sizes: Sequence[int], keys: str) -> dict[str, Any]:
    """What a strategy declares, and what it sends and holds: in a step, or a window of them."""
    plan = Plan.parse(f"data={mesh.num_ranks} pieces={len(sizes)} {keys}")
    drive = Drive(mesh, factory, sizes)
    host = drive.strategy.host if isinstance(drive.strategy, AllReduce) else None
    facts = dataclasses.replace(_facts(plan), shares=host is not None)
    declared = drive.strategy.costs(RankLayout(facts, mesh.rank))
    for step in range(plan.local_steps):
        assert drive.step(step)
    with pytest.MonkeyPatch.context() as monkey:
        counter, before = _MessageCounter(monkey), mesh.bytes_sent
        for step in range(plan.local_steps, 2 * plan.local_steps):
            assert drive.step(step)
        sent, count = mesh.bytes_sent - before, counter.count
    storages = {s.data_ptr(): s for s in (p.untyped_storage() for p in drive.model.parameters())}
    held = sum(storage.nbytes() for storage in storages.values())
    stepped = num_stepped(drive.strategy, drive.optimizer)
    if host is not None:  # all hold it once
        own = [p for p in drive.model.parameters() if not p.requires_grad]
        held = host.rows[0].nbytes // mesh.num_ranks + sum(p.nbytes for p in own)
    drive.strategy.detach()
    return {
        "declared": {
            "bytes": sum(message.num_bytes for message in declared.messages),
            "messages": sum(message.count for message in declared.messages),
            "parameters": declared.memory.parameters.num_bytes,
            "stepped": declared.num_stepped,
        },
        "real": {
            "bytes": sent,
            "messages": count,
            "parameters": held,
            "stepped": stepped,
        },
    }


class _MessageCounter:
    """Counts the collectives of all groups."""

    def __init__(self, monkey: pytest.MonkeyPatch):
        self.count = 0
        summed, moved = ("all_reduce", "reduce_scatter"), ("all_to_all", "all_gather_shards")
        for name in (*summed, *moved, "_numbers_in_memory"):
            monkey.setattr(Group, name, self._counted(getattr(Group, name)))

    def _counted(self, method: Any) -> Any:
        def counted(group: Group, *args: Any) -> Any:
            self.count += group.num_ranks > 1
            return method(group, *args)

        return counted


def _facts(plan: Plan) -> PlanFacts:
    """What `explain` would find out about the network."""
    model, draws = Network(), torch.Generator().manual_seed(0)
    buffers = dict(model.named_buffers())
    held = PieceBuffers(model)
    model(torch.randn(4, 6, generator=draws), True)
    changed = zip(buffers, held.end_piece(), strict=True)
    parameters = [
        ModelParameter(name, tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in model.named_parameters()
    ]
    adam = [StateTensor(None, 4), StateTensor(None, 4), StateTensor((), 4)]
    return PlanFacts(
        plan=plan,
        survey=Survey(),
        parameters=parameters,
        units=[],
        state={p.name: adam for p in parameters if p.is_trained},
        is_element_wise=True,
        buffers={name: buffer.nbytes for name, buffer in buffers.items()},
        changed={name: value.numel() for name, value in changed if value is not None},
        averaged_buffers=sum(b.numel() for b in buffers.values() if b.is_floating_point()),
        clips=True,
    )


@cache
def _run_undisturbed(
    pool: Pool, num_ranks: int, factory: Factory, sizes: tuple[int, ...]
) -> list[dict[str, Any]]:
    """What the ranks answer; many tests compare with it."""
    return pool.run(_undisturbed, num_ranks, importable_name(factory), sizes)


class StrategyConformance:
    """Inherit, give `factory`, and say how near to one rank the strategy is meant to come."""

    parity: Literal["bits", "close", "none"] = "bits"  # none: it trains something else on purpose
    agrees_every_step = True  # whether all ranks agree on gradients in every exchange
    holds_all = True  # whether every rank holds the whole state
    holds_gradient = True  # and the whole gradient
    # Of a plan that chooses it, beside data and pieces. Every update is checked here, as by fp16.
    plan = "precision=fp16"

    @pytest.fixture
    def factory(self) -> Factory:
        raise NotImplementedError("give a function of a module that makes the strategy")

    @pytest.fixture
    def long_factory(self, factory: Factory) -> Factory:
        """For a run that does not end with the second window of local steps."""
        return factory

    @pytest.mark.parametrize("sizes", [EVEN, UNEVEN, WITH_EMPTY], ids=["even", "uneven", "empty"])
    @pytest.mark.parametrize("num_ranks", [2, 3, 4])
    def test_many_ranks_train_what_one_does(
        self, pool: Pool, factory: Factory, num_ranks: int, sizes: tuple[int, ...]
    ) -> None:
        if self.parity == "none":
            pytest.skip("this strategy does not train what one rank would, on purpose")
        (one,) = _run_undisturbed(pool, 1, factory, sizes)
        many = _run_undisturbed(pool, num_ranks, factory, sizes)
        groups = [[answer] for answer in many] if self.holds_all else [many]
        for group in groups:
            self._compare(
                {"losses": group[0]["losses"], "state": _assembled([a["state"] for a in group])},
                {"losses": one["losses"], "state": _assembled([one["state"]])},
                bits=self.parity == "bits",
            )

    def test_all_ranks_end_alike(self, pool: Pool, factory: Factory) -> None:
        first, *others = _run_undisturbed(pool, 3, factory, EVEN)
        models = [
            {n: t for n, t in answer["state"].items() if n.startswith('["model.')}
            for answer in (first, *others)
        ]
        for other in models[1:]:
            assert all(torch.equal(models[0][name], other[name]) for name in models[0])

    @pytest.mark.parametrize("num_ranks", [1, 2])
    def test_attach_and_detach_can_be_repeated(
        self, pool: Pool, factory: Factory, num_ranks: int
    ) -> None:
        self._compare_with_undisturbed(pool, factory, num_ranks, _attached_again)

    @pytest.mark.parametrize("at_step", [2, 3])
    @pytest.mark.parametrize("num_ranks", [1, 3])
    def test_a_fresh_instance_continues_from_the_state(
        self, pool: Pool, factory: Factory, num_ranks: int, at_step: int
    ) -> None:
        self._compare_with_undisturbed(pool, factory, num_ranks, _moved, at_step)

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_a_gradient_that_is_not_finite_changes_nothing(
        self, pool: Pool, factory: Factory, num_ranks: int
    ) -> None:
        self._compare_with_undisturbed(pool, factory, num_ranks, _poisoned, True)

    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_one_rank_that_is_not_finite_stops_all(
        self, pool: Pool, factory: Factory, num_ranks: int
    ) -> None:
        if not self.agrees_every_step:
            pytest.skip("between two averages the replicas decide alone")
        self._compare_with_undisturbed(pool, factory, num_ranks, _poisoned, False)

    @pytest.mark.parametrize("regroup", [False, True], ids=["first-piece", "last-piece"])
    @pytest.mark.parametrize("num_ranks", [1, 2])
    def test_an_aborted_step_leaves_no_trace(
        self, pool: Pool, factory: Factory, num_ranks: int, regroup: bool
    ) -> None:
        self._compare_with_undisturbed(pool, factory, num_ranks, _aborted, regroup)

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_what_no_piece_touched_has_no_gradient(
        self, pool: Pool, factory: Factory, num_ranks: int
    ) -> None:
        found = pool.run(_gradients, num_ranks, importable_name(factory), EVEN)
        holds_all = self.holds_all and self.holds_gradient
        for names in found if holds_all else [sorted(set().union(*found))]:
            assert "unused" not in names and "frozen" not in names
            assert "head.weight" in names
            if self.agrees_every_step:  # the rank that has the piece, and all the others
                assert "rare" in names

    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_a_step_sends_and_holds_what_was_declared(
        self, pool: Pool, long_factory: Factory, num_ranks: int
    ) -> None:
        name = importable_name(long_factory)
        for rank, found in enumerate(pool.run(_costs, num_ranks, name, EVEN, self.plan)):
            assert found["declared"] == found["real"], f"rank {rank} of {num_ranks}"

    def _compare_with_undisturbed(
        self,
        pool: Pool,
        factory: Factory,
        num_ranks: int,
        disturbed: Callable[..., dict[str, Any]],
        *arguments: Any,
    ) -> None:
        plain = _run_undisturbed(pool, num_ranks, factory, EVEN)
        others = pool.run(disturbed, num_ranks, importable_name(factory), EVEN, *arguments)
        for mine, theirs in zip(others, plain, strict=True):
            self._compare(mine, theirs, bits=True)

    def _compare(self, mine: dict[str, Any], theirs: dict[str, Any], *, bits: bool) -> None:
        rtol, atol = (0.0, 0.0) if bits else (1e-4, 1e-6)
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=rtol, abs=atol)
        assert mine["state"].keys() == theirs["state"].keys()
        for name, tensor in theirs["state"].items():
            same = torch.allclose(mine["state"][name], tensor, rtol, atol, equal_nan=bits)
            assert same, f"{name}: {mine['state'][name]} is not {tensor}"
