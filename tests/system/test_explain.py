"""What `shoal explain` says, held against ranks that train; and the verb on the command line."""

from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from torch import Tensor

from shoal.cli.main import run_here
from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.cost.explain import Explanation, explain
from shoal.plans.plan import Plan
from shoal.sync.allreduce import AllReduce
from shoal.sync.choose import strategy_class
from shoal.sync.fsdp import FullySharded
from shoal.sync.local import LocalSGD
from shoal.sync.server.local import LocalServerStrategy
from shoal.sync.server.strategy import ServerStrategy
from shoal.sync.zero import ZeroSharded
from shoal.testing.ranks import Pool
from shoal.training.run import resolve
from shoal.training.trainer import Trainer
from tests import zoo
from tests.parity import phased, tabled
from tests.parity.runs import GivenSeat
from tests.support.faults import Trained, start

TINY = str(Path(__file__).with_name("tiny.py"))
ZOO = str(Path(__file__).parents[1] / "zoo.py")
FSDP = ("all-gather", "reduce-scatter")


class Watched:
    """Everything this rank sends: through our groups, and what FSDP2 sends by itself."""

    def __init__(self, monkey: pytest.MonkeyPatch):
        self.groups: list[Group] = []
        self.by_fsdp = self.count_by_fsdp = self.count_by_groups = 0
        init = Group.__init__

        def watched(group: Group, *args: Any, **options: Any) -> None:
            init(group, *args, **options)
            if "sent" not in options:  # else bytes are counted where it is a part of another
                self.groups.append(group)

        monkey.setattr(Group, "__init__", watched)
        ours = "all_reduce", "all_to_all", "all_gather_shards", "_numbers_in_memory"
        for name in (*ours, "reduce_scatter"):
            monkey.setattr(Group, name, self._told(getattr(Group, name)))
        for name in ("all_gather_single", "reduce_scatter_single"):
            monkey.setattr(dist, name, self._counted(getattr(dist, name)))

    def _told(self, method: Any) -> Any:
        def told(group: Group, *args: Any) -> Any:
            self.count_by_groups += group.num_ranks > 1
            return method(group, *args)

        return told

    def _counted(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            shard = min(t.nbytes for t in tensors)
            num_ranks = max(t.nbytes for t in tensors) // shard if shard else 1
            self.by_fsdp += shard * (num_ranks - 1)
            self.count_by_fsdp += 1
            return function(*args, **kwargs)

        return counted

    def taken(self) -> dict[str, int]:
        return {
            "by_groups": sum(group.bytes_sent for group in self.groups),
            "count_by_groups": self.count_by_groups,
            "by_fsdp": self.by_fsdp,
            "count_by_fsdp": self.count_by_fsdp,
        }


def run_of(recipe: str) -> Any:
    return getattr(phased if recipe in phased.RECIPES else zoo, recipe)()


def train(mesh: Mesh, recipe: str, plan: str) -> dict[str, Any]:
    """Train some steps on this rank; what it holds, and what the last step sent."""
    run = run_of(recipe)
    with pytest.MonkeyPatch.context() as monkey:
        watched = Watched(monkey)
        with Trainer(run, resolve(run, plan, mesh.num_ranks), GivenSeat(mesh)) as trainer:
            # A slow moment must not move work: that is a message more.
            trainer.balancing = trainer.balancing._replace(load=None)
            steps = iter(trainer)
            next(steps)
            before = watched.taken()
            info = next(steps)
            after = watched.taken()
            names = {name for name, _ in trainer.model.named_parameters()}
            held = {n: parts for n, parts in trainer.spread.held().items() if n in names}
            groups = trainer.optimizer.param_groups
            kept = [t for s in trainer.optimizer.state.values() for t in s.values()]
            stepped = sum(p.numel() for g in groups for p in g["params"])
            state = sum(t.nbytes for t in kept if isinstance(t, Tensor))
            strategy = trainer.strategy
            if isinstance(strategy, AllReduce) and (host := strategy.host) is not None:
                stepped = sum(s.length for _, s in host.own_segments())
                state = host.layout.num_slots * host.rows[0].nbytes // mesh.num_ranks
                state += sum(t.nbytes for t in kept if not t.dim())  # steps, which each counts
            return {
                "held": sum(part.tensor.numel() for parts in held.values() for part in parts),
                "stepped": stepped,
                "state": state,
                "bytes_sent": info.bytes_sent,
                **{name: after[name] - before[name] for name in after},
            }


PLANS = [
    ("gpt", "data=2"),
    ("gpt", "data=2 accumulate=2"),
    ("gpt", "data=4 sums=ring"),
    ("gpt", "data=4 sums=ring memory=apart"),
    ("cnn", "data=2 pieces=4 memory=apart"),
    ("cnn", "data=4"),
    ("cnn", "data=2 pieces=4"),
    ("gpt", "data=4 zero=1"),
    ("gpt", "data=2 zero=1 accumulate=2"),
    ("cnn", "data=2 zero=2 accumulate=2"),
    ("frozen", "data=2 zero=2"),
    ("gpt", "data=2 zero=3"),
    ("frozen", "data=2 zero=3"),
    ("gpt", "data=2 zero=2 memory=apart"),
    ("gpt", "data=4 zero=3 codec=int8"),
    ("frozen", "data=2 zero=3 accumulate=2 codec=powersgd:2"),
    ("gpt", "pipeline=2"),
    ("gpt", "pipeline=4 schedule=gpipe"),
    ("gpt", "pipeline=2 schedule=zbv microbatches=4"),
    ("unet", "pipeline=2 schedule=interleaved microbatches=4"),
    ("towers", "pipeline=2 schedule=zero-bubble"),
    ("gpt", "tensor=2"),
    ("cnn", "tensor=2 recompute=blocks"),
    ("gpt", "data=2 tensor=2 zero=1"),
    ("gpt", "data=2 pipeline=2 zero=2 microbatches=2"),
    ("gpt", "tensor=2 pipeline=2"),
    ("gpt", "data=2 tensor=2 zero=3"),
    ("cnn", "data=2 zero=3 recompute=blocks accumulate=2"),
    ("cnn", "data=2 local_steps=2"),
    ("mlp", "data=2 zero=1 precision=fp16"),
    ("bandit", "data=2 zero=1"),
    ("bandit", "data=3 pieces=6"),
    pytest.param("t5", "pipeline=2 tensor=2 schedule=gpipe", marks=pytest.mark.full),
]


@pytest.mark.quick(
    "gpt-data=2",
    "gpt-data=4 sums=ring",
    "cnn-data=2 pieces=4",
    "gpt-data=4 zero=1",
    "cnn-data=2 zero=2 accumulate=2",
    "frozen-data=2 zero=3",
    "gpt-data=4 zero=3 codec=int8",
    "gpt-pipeline=2 schedule=zbv microbatches=4",
    "towers-pipeline=2 schedule=zero-bubble",
    "cnn-tensor=2 recompute=blocks",
    "gpt-data=2 pipeline=2 zero=2 microbatches=2",
    "cnn-data=2 local_steps=2",
    "mlp-data=2 zero=1 precision=fp16",
    "bandit-data=2 zero=1",
)
@pytest.mark.parametrize(("recipe", "plan"), PLANS)
def test_ranks_hold_and_send_what_was_said(pool: Pool, recipe: str, plan: str) -> None:
    run = run_of(recipe)
    told = explain(run, resolve(run, plan, None))
    truth = pool.run(train, told.num_ranks, recipe, plan)
    for rank, real in zip(told.ranks, truth, strict=True):
        assert rank.num_held == real["held"]
        assert rank.num_stepped == real["stepped"]
        if recipe == "frozen":  # one of its parameters idles, and never gets the state foreseen
            assert rank.memory.optimizer.num_bytes >= real["state"]
        else:
            assert rank.memory.optimizer.num_bytes == real["state"]
        own_groups = FSDP if "zero=3" in plan else ()  # of torch
        by_fsdp = [m for m in rank.messages if m.how in own_groups]
        by_groups = [m for m in rank.messages if m.how not in own_groups]
        assert sum(m.num_bytes for m in rank.messages) == real["by_groups"]
        collectives = [m.count for m in by_groups if m.how not in ("send", "in memory")]
        assert sum(collectives) == real["count_by_groups"]
        assert sum(m.num_bytes for m in by_fsdp) == real["by_fsdp"]
        assert sum(m.count for m in by_fsdp) == real["count_by_fsdp"]
        assert sum(m.num_bytes for m in rank.messages) == real["bytes_sent"]


WINDOWS = [
    ("cnn", "data=2 local_steps=3 outer=nesterov"),
    ("gpt", "data=4 local_steps=2 outer=nesterov codec=int4"),
    ("cnn", "data=4 zero=1 replicas=2 local_steps=3 outer=nesterov"),
    pytest.param("gpt", "data=2 tensor=2 local_steps=2", marks=pytest.mark.full),
    pytest.param("mlp", "data=2 pipeline=2 local_steps=2 outer=nesterov", marks=pytest.mark.full),
    pytest.param("mlp", "data=4 zero=3 replicas=2 local_steps=2", marks=pytest.mark.full),
    ("cnn", "data=2 local_steps=4 outer=nesterov fragments=3"),
    ("gpt", "data=2 pipeline=2 local_steps=4 outer=nesterov fragments=2"),
    ("gpt", "data=4 local_steps=4 outer=nesterov codec=int8 fragments=2"),
    ("frozen", "data=2 local_steps=4 codec=bf16 fragments=2"),
]


def train_window(mesh: Mesh, recipe: str, plan: str) -> int:
    """What this rank sends in its second window of local steps."""
    run = getattr(zoo, recipe)()
    resolved = resolve(run, plan, mesh.num_ranks)
    with Trainer(run, resolved, GivenSeat(mesh)) as trainer:
        infos = list(islice(trainer, 2 * resolved.local_steps))
    return sum(info.bytes_sent for info in infos[resolved.local_steps :])


@pytest.mark.parametrize(("recipe", "plan"), WINDOWS)
def test_ranks_send_in_a_window_what_was_said(pool: Pool, recipe: str, plan: str) -> None:
    run = getattr(zoo, recipe)()
    told = explain(run, resolve(run, plan, None))
    sent = [sum(message.num_bytes for message in rank.messages) for rank in told.ranks]
    assert pool.run(train_window, told.num_ranks, recipe, plan) == sent
    assert told.ranks[0].memory.extra.num_bytes > told.ranks[0].memory.gradients.num_bytes / 2


# A bound lets workers say nothing to each other; with three pieces one of two has two rows to push.
# Of local steps, two and then one are a window, so three steps push twice.
SERVED = [
    ("cnn", "data=4 sync=server hosts=2 pieces=8", 3),
    ("cnn", "data=2 sync=server servers=2", 3),
    ("gpt", "data=2 sync=server servers=3 pieces=4 staleness=2 codec=bf16", 3),
    pytest.param("gpt", "data=3 sync=server pieces=4", 3, marks=pytest.mark.full),
    pytest.param("cnn", "data=3 sync=server pieces=8 combine=median", 3, marks=pytest.mark.full),
    ("cnn", "data=2 sync=server servers=2 local_steps=2 codec=int4", 2),
    ("gpt", "data=2 sync=server local_steps=2 outer=nesterov staleness=any", 2),
    ("cnn", "data=2 sync=server servers=2 local_steps=2 codec=int8 deadline=300", 2),
    ("cnn", "data=4 replicas=2 sync=server servers=2", 3),
    ("mlp", "data=2 pipeline=2 sync=server servers=2", 3),
    ("gpt", "data=4 replicas=2 sync=server staleness=1", 3),
    ("mlp", "data=2 tensor=2 sync=server servers=2 staleness=any", 3),
    ("cnn", "data=4 replicas=2 sync=server local_steps=2 deadline=300", 2),
    ("mlp", "data=2 pipeline=2 sync=server servers=2 local_steps=2 deadline=300", 2),
]


def test_every_strategy_is_held_against_what_it_sends() -> None:
    cells = [getattr(cell, "values", cell) for cell in (*PLANS, *WINDOWS, *SERVED)]
    tried = {strategy_class(Plan.parse(plan)) for _, plan, *_ in cells}
    every = {AllReduce, ZeroSharded, FullySharded, LocalSGD, LocalServerStrategy, ServerStrategy}
    assert tried == every


@pytest.mark.quick(
    "cnn-data=4 sync=server hosts=2 pieces=8-3",
    "gpt-data=2 sync=server servers=3 pieces=4 staleness=2 codec=bf16-3",
    "cnn-data=2 sync=server servers=2 local_steps=2 codec=int8 deadline=300-2",
)
@pytest.mark.parametrize(("recipe", "plan", "times"), SERVED)
def test_workers_push_what_was_said(
    pool: Pool, tmp_path: Path, recipe: str, plan: str, times: int
) -> None:
    run = getattr(zoo, recipe)()
    resolved = resolve(run, plan, None)
    told = explain(run, resolved)
    # The ranks of a replica tell each other something in every step of a window.
    steps = 3 if resolved.num_ranks_apart == 1 else times * resolved.local_steps
    settings = {"steps": steps}
    training = start(pool, f"{ZOO}:{recipe}", tmp_path / "run", plan=plan, settings=settings)
    trained = training.wait()
    assert trained.exit_code == 0, trained.errors
    sent = sum(message.num_bytes for rank in told.ranks for message in rank.messages)
    assert trained.result["bytes_sent"] == times * sent


@pytest.mark.quick("data=2 sync=server staleness=1")
@pytest.mark.parametrize(
    "plan", ["data=2 sync=server servers=2 pieces=6", "data=2 sync=server staleness=1"]
)
def test_workers_look_up_and_push_what_was_said_of_tables(
    pool: Pool, tmp_path: Path, plan: str
) -> None:
    """Of the first batch, which is the one that was looked at."""
    run = tabled.rowwise()
    told = explain(run, resolve(run, plan, None))
    recipe = f"{tabled.__file__}:rowwise"
    trained = start(pool, recipe, tmp_path / "run", plan=plan, settings={"steps": 1}).wait()
    assert trained.exit_code == 0, trained.errors
    sent = sum(message.num_bytes for rank in told.ranks for message in rank.messages)
    assert trained.result["bytes_sent"] == sent
    said = {m.what for m in told.ranks[0].messages}
    assert "gradients of rows" in said and ("numbers of rows" in said) == ("staleness" in plan)
    held = sum(row.memory.parameters.num_bytes for row in told.servers)
    assert held >= 4 * tabled.WIDTH * (tabled.USERS + tabled.WORDS)


# ---- the verb


def shoal_explain(pool: Pool, directory: Path, *words: str) -> Trained:
    output, errors = directory / "output", directory / "errors"
    command = pool.start(
        run_here, ["explain", *words], output=output, errors=errors, directory=directory
    )
    code = command.wait()
    return Trained(code, output.read_text(), errors.read_text(), directory / "runs")


def test_words_for_people(pool: Pool, tmp_path: Path) -> None:
    plan = "data=2 zero=1 pieces=2 memory=apart"
    done = shoal_explain(pool, tmp_path, f"{TINY}:line", "--plan", plan)
    assert done.exit_code == 0, done.errors
    assert done.output.startswith(f"{TINY}:line under '{plan}': 2 ranks = data 2;")
    for word in ("Memory of the rank that has most", "reduce-scatter", "are not predicted"):
        assert word in done.output
    assert "greeting" not in done.output, "what a recipe prints is kept out of the answer"
    assert not done.run_dir.exists()


def test_one_object_and_a_picture(pool: Pool, tmp_path: Path) -> None:
    words = (f"{TINY}:line", "--plan", "data=64", "--set", "batch_size=64", "--json")
    done = shoal_explain(pool, tmp_path, *words, "--svg", "plan.svg")
    assert done.exit_code == 0, done.errors
    found = msgspec.json.decode(done.output, type=Explanation)
    assert found.num_ranks == len(found.ranks) == 64, "more ranks than any test machine has cores"
    picture = (tmp_path / "plan.svg").read_text("utf-8")
    assert picture.startswith("<svg") and "Not drawn: 56 more ranks." in picture


def test_which_host_each_rank_would_be_on(pool: Pool, tmp_path: Path) -> None:
    words = (f"{TINY}:line", "--plan", "data=8", "--nodes", "2")
    done = shoal_explain(pool, tmp_path, *words)
    assert done.exit_code == 0, done.errors
    assert "host 0  ranks 0, 1, 2, 3\n" in done.output
    assert "gradients cross hosts in clear text: it needs --trust-network" in done.output
    done = shoal_explain(pool, tmp_path, *words, "--json")
    assert msgspec.json.decode(done.output.splitlines()[-1])["host_of_seat"] == [
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ((f"{TINY}:line", "--plan", "data=3"), 2, "data=3 does not divide the batch of 8"),
        ((f"{TINY}:line", "--plan", "pipeline=4"), 2, "cannot be cut into 4 stages"),
        ((f"{TINY}:line", "--plan", "date=2"), 2, "Did you mean 'data'?"),
        ((f"{TINY}:line", "--svg", "absent/plan.svg"), 2, "The picture cannot be written"),
        ((f"{TINY}:line", "--slots", "2"), 2, "--slots has no effect without --nodes N"),
        (
            (f"{TINY}:line", "--plan", "data=8", "--nodes", "2", "--slots", "3"),
            2,
            "has 8 ranks, and the hosts have slots for 6: 3 on host 0, 3 on host 1",
        ),
        ((f"{TINY}:fails",), 1, "a key of the recipe's own"),
        ((f"{TINY}:absent",), 2, "has no recipe 'absent'"),
    ],
)
def test_what_cannot_be_explained(
    pool: Pool, tmp_path: Path, words: tuple[str, ...], code: int, told: str
) -> None:
    done = shoal_explain(pool, tmp_path, *words)
    assert done.exit_code == code, done.errors
    assert told in done.last_words
