"""Plans that a model or a batch does not allow: one sentence, exit code 2, and no rank started.

Beside them stand plans that look as bad and are not: those must train what one process would.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.cli.main import run_here
from shoal.testing.ranks import Pool

RECIPES = str(Path(__file__).with_name("bad_plans.py"))
ZOO = str(Path(__file__).parents[1] / "zoo.py")

Shoal = Callable[..., tuple[int, str]]


@pytest.fixture
def shoal(pool: Pool, tmp_path: Path) -> Shoal:
    """Run a command in an empty directory; its exit code and what it said to a person."""

    def run(*words: str) -> tuple[int, str]:
        output, errors = tmp_path / "output", tmp_path / "errors"
        place = tmp_path / "place"
        place.mkdir(exist_ok=True)
        command = pool.start(run_here, list(words), output=output, errors=errors, directory=place)
        return command.wait(), errors.read_text()

    return run


class Bad(NamedTuple):
    recipe: str
    plan: str
    told: str
    settings: tuple[str, ...] = ()


BAD = {
    "heads": Bad(f"{ZOO}:gpt", "tensor=3", "tensor=3 does not divide 4 heads, in"),
    "no matrix divides": Bad(f"{RECIPES}:plain", "tensor=3", "tensor=3 can cut nothing of this"),
    "path by data": Bad(
        f"{RECIPES}:wavers",
        "pipeline=2",
        "Wavers cannot be cut into stages: in its forward __bool__ turns a computed tensor into",
    ),
    "too many ranks": Bad(
        f"{RECIPES}:plain",
        "pipeline=8",
        "cannot be cut into 8 stages: 4 is the most. Every stage must use a parameter",
    ),
    "too many stages": Bad(
        f"{RECIPES}:plain",
        "pipeline=2 schedule=interleaved stages=4",
        "Use at most 4 stages (pipeline ranks x stages per rank).",
    ),
    "a rank without parameters": Bad(
        f"{RECIPES}:single", "pipeline=2", "1 is the most. Every stage must use a parameter"
    ),
    "too many fragments": Bad(
        f"{RECIPES}:bare",
        "data=2 local_steps=8 fragments=3",
        "fragments=3 does not go with a model that trains 2 parameters: a fragment is one of them "
        "at least. Use fragments=2 or fewer.",
    ),
    "servers and shards": Bad(
        f"{RECIPES}:plain",
        "data=2 sync=server zero=1",
        "zero=1 does not go with sync=server: optimizer state lives on the servers, and no rank "
        "holds any to spare. Leave zero out, or sync=server.",
    ),
    "more copies than servers": Bad(
        f"{RECIPES}:plain",
        "data=2 sync=server copies=2",
        "copies=2 does not fit on servers=1. Each copy of a shard lives on a server of its own. "
        "Use servers=2 or copies=1.",
    ),
    "statistics in two stages": Bad(
        f"{RECIPES}:shared_statistics",
        "pipeline=2",
        "Repeats changes its buffer norm.running_mean in its forward, and stages 0, 1 of 2 use it.",
    ),
    "too few microbatches": Bad(
        f"{RECIPES}:plain",
        "pipeline=4 microbatches=2",
        "microbatches=2 does not go with schedule=1f1b over pipeline=4, which needs one for each",
    ),
    "uneven rounds": Bad(
        f"{RECIPES}:plain",
        "pipeline=2 schedule=interleaved microbatches=5",
        "needs a number that falls into 2 equal rounds. Use microbatches=4 or 6",
    ),
    "microbatches do not divide": Bad(
        f"{RECIPES}:plain",
        "pipeline=3",
        "microbatches=6 = 6 pieces do not divide the batch of 16",
    ),
    "nobody to share with": Bad(
        f"{RECIPES}:plain", "zero=1 data=1", "zero=1 has no effect with data=1"
    ),
    "batch does not divide": Bad(
        f"{RECIPES}:plain",
        "data=2 tensor=2",
        "data=2 does not divide the batch of 15",
        ("batch_size=15",),
    ),
    "short batch in a pipeline": Bad(
        f"{RECIPES}:plain", "pipeline=2", "pipeline does not go with end='pad'", ("end=pad",)
    ),
    "short batch and servers": Bad(
        f"{RECIPES}:plain",
        "data=2 sync=server",
        "sync=server does not go with end='pad': the short batch at the end of an epoch may leave",
        ("end=pad",),
    ),
    "short batch in shards": Bad(
        f"{RECIPES}:plain", "data=2 zero=3", "zero=3 does not go with end='pad'", ("end=pad",)
    ),
    "a table that shrinks": Bad(
        f"{RECIPES}:shrinks", "data=2", "The forward writes to its parameter table.weight"
    ),
    "a parameter written": Bad(
        f"{RECIPES}:writes", "pipeline=2", "The forward writes to its parameter 2.scale"
    ),
    "sparse gradients": Bad(
        f"{RECIPES}:sparse",
        "data=2",
        "table.weight is a table, an embedding with sparse gradients, and 2 ranks exchange dense",
    ),
    "sparse gradients, fused": Bad(
        f"{RECIPES}:sparse_by_fused", "data=1", "the fused kernel of its optimizer takes dense"
    ),
    "a table by Adam": Bad(
        f"{RECIPES}:sparse_by_adam", "data=2 sync=server", "AdamW takes dense gradients only"
    ),
    "a table with momentum": Bad(
        f"{RECIPES}:sparse_by_momentum", "data=2 sync=server", "momentum=0.9 of its optimizer"
    ),
    "a table that is tied": Bad(
        f"{RECIPES}:sparse_and_tied",
        "data=2 sync=server",
        "0.weight is a table whose rows are on servers, and the model uses it as 1.weight too",
    ),
    "a table with max_norm": Bad(
        f"{RECIPES}:sparse_shrinks", "data=1 sync=server", "max_norm=1.0 changes rows where they"
    ),
    "a table and a median": Bad(
        f"{RECIPES}:sparse", "data=4 sync=server combine=median", "there is no middle of one"
    ),
    "a table that is looked up again": Bad(
        f"{RECIPES}:sparse_in_a_block",
        "data=2 sync=server staleness=any recompute=blocks",
        "recompute=blocks does not go with staleness=any and the table 0.table.weight",
    ),
    "a table and rounded gradients": Bad(
        f"{RECIPES}:sparse",
        "data=2 sync=server codec=fp16",
        "codec=fp16 does not go with the table table.weight yet",
    ),
    "a table and hosts": Bad(
        f"{RECIPES}:sparse",
        "data=4 sync=server hosts=2",
        "hosts=2 does not go with the table table.weight yet",
    ),
    "a table and local steps": Bad(
        f"{RECIPES}:sparse",
        "data=2 sync=server local_steps=2",
        "local_steps=2 does not go with the table table.weight yet",
    ),
    "a bag of rows": Bad(
        f"{RECIPES}:bag", "data=2", "is a table, an embedding with sparse gradients, and 2 ranks"
    ),
    "dtypes in one unit": Bad(
        f"{RECIPES}:mixed", "data=2 zero=3", "second.weight is float64 and first.weight is float32"
    ),
    "a gradient in the forward": Bad(
        f"{RECIPES}:steep", "pipeline=2", "in its forward it takes a gradient of its own (grad)"
    ),
    "a checkpoint of its own": Bad(
        f"{RECIPES}:remembers", "tensor=2", "calls torch.utils.checkpoint without a context_fn"
    ),
    "no blocks": Bad(f"{RECIPES}:bare", "recompute=blocks", "recompute=blocks finds no blocks"),
}
# `train` for all; the two others for one that needs the model and one that does not.
VERBS = [("train", name) for name in BAD]
VERBS += [(v, n) for v in ("verify", "explain") for n in ("heads", "uneven rounds")]


@pytest.mark.quick(
    "train-heads",
    "verify-heads",
    "explain-heads",
    "train-path by data",
    "train-too many stages",
    "train-too many fragments",
    "train-servers and shards",
    "train-more copies than servers",
    "train-statistics in two stages",
    "train-too few microbatches",
    "train-nobody to share with",
    "train-batch does not divide",
    "train-short batch and servers",
    "train-a table that shrinks",
    "train-sparse gradients",
    "train-a table by Adam",
    "train-a table that is looked up again",
    "train-a table and hosts",
    "train-dtypes in one unit",
    "train-a gradient in the forward",
    "train-a checkpoint of its own",
    "train-no blocks",
)
@pytest.mark.parametrize(("verb", "name"), VERBS)
def test_it_is_refused_before_a_rank_starts(
    shoal: Shoal, tmp_path: Path, verb: str, name: str
) -> None:
    bad = BAD[name]
    settings = [word for setting in bad.settings for word in ("--set", setting)]
    code, errors = shoal(verb, bad.recipe, "--plan", bad.plan, *settings)
    assert code == 2, errors
    assert bad.told in errors
    assert "Traceback" not in errors
    assert errors.strip().count("\n") == 0, "one sentence for a person, and nothing else"
    assert not [path for path in (tmp_path / "place").rglob("*") if path.is_file()]


AT_FIRST_STEP = {
    "the middle of sums": Bad(
        f"{RECIPES}:weighs",
        "data=3 sync=server combine=median",
        "combine=median does not go with a loss that returns (sum, weight)",
    ),
    "a parameter written": Bad(f"{RECIPES}:writes", "data=2", "writes to its parameter 2.scale"),
    "a gathered parameter written": Bad(
        f"{RECIPES}:writes", "data=2 zero=3", "writes to its parameter 2.scale"
    ),
    "data of a parameter replaced": Bad(
        f"{RECIPES}:limits", "data=2", "writes to its parameter 2.weight"
    ),
    "data of a parameter written": Bad(
        f"{RECIPES}:limits", "data=2", "writes to its parameter 2.weight", ("in_place=true",)
    ),
    "data of a gathered parameter written": Bad(
        f"{RECIPES}:limits", "data=2 zero=3", "writes to its parameter 2.weight", ("in_place=true",)
    ),
    "a parameter of a block written outside of it": Bad(
        f"{RECIPES}:limited", "data=2 zero=3", "writes to its parameter last.0.weight"
    ),
    "a parameter replaced": Bad(
        f"{RECIPES}:replaces", "data=2 memory=apart", "writes to its parameter 2.layer.weight"
    ),
    "experts without a sample": Bad(
        f"{RECIPES}:experts", "data=2 zero=3", "under zero=3 all must run the same blocks"
    ),
    "layers dropped": Bad(
        f"{RECIPES}:experts",
        "data=2 zero=3",
        "under zero=3 all must run the same blocks",
        ("drops=true",),
    ),
    "a shard read": Bad(
        f"{RECIPES}:decays",
        "data=2 zero=3",
        "The model uses its parameter layers.0.weight (in square) outside of the forward of its",
    ),
}


@pytest.mark.quick("the middle of sums", "data of a parameter replaced", "experts without a sample")
@pytest.mark.parametrize("name", AT_FIRST_STEP)
def test_what_only_a_forward_can_tell_is_refused_at_the_first_step(shoal: Shoal, name: str) -> None:
    bad = AT_FIRST_STEP[name]
    settings = [word for setting in bad.settings for word in ("--set", setting)]
    code, errors = shoal("train", bad.recipe, "--plan", bad.plan, *settings)
    assert code == 2, errors
    assert bad.told in errors and "failed at step 1" in errors
    assert "Traceback" not in errors


@pytest.mark.full
def test_an_evaluation_on_unlike_blocks_is_refused(shoal: Shoal) -> None:
    recipe = f"{RECIPES}:experts"
    code, errors = shoal("train", recipe, "--plan", "data=2 zero=2", "--run-dir", "run")
    assert code == 0, errors
    code, errors = shoal("evaluate", recipe, "--from", "run", "--plan", "data=2 zero=3")
    assert code == 2 and "under zero=3 all must run the same blocks" in errors, errors
    code, errors = shoal("evaluate", recipe, "--from", "run", "--plan", "data=2 zero=2")
    assert code == 0, errors


GOOD = [
    ("writes", "tensor=2"),
    ("teaches", "tensor=2"),
    ("limits", "tensor=2"),
    ("steep", "tensor=2"),
    ("multiplies", "tensor=2"),
    ("half_frozen", "pipeline=2"),
    ("tied", "pipeline=2"),
    ("shared_norm", "pipeline=2"),
    ("counts", "pipeline=2 schedule=interleaved"),
    ("tracks", "pipeline=2 schedule=zbv"),
    ("shared_statistics", "data=2 zero=1"),
]
GOOD_TOO = [
    ("experts", "data=2 zero=2"),
    ("half_frozen", "data=2 zero=3 pipeline=2"),
    ("half_frozen", "data=2 zero=1 pipeline=2"),
    ("half_frozen", "pipeline=2 schedule=zero-bubble"),
    ("tied", "data=2 zero=2 pipeline=2"),
    ("tied", "data=2 zero=3 pipeline=2"),
    ("tied", "pipeline=2 schedule=zbv"),
    ("counts", "pipeline=2"),
    ("tracks", "pipeline=2"),
    ("tracks", "data=2 pipeline=2 schedule=interleaved"),
    ("shared_statistics", "data=2 zero=3"),
]


@pytest.mark.quick(
    "multiplies-tensor=2",
    "tied-pipeline=2",
    "counts-pipeline=2 schedule=interleaved",
    "shared_statistics-data=2 zero=1",
)
@pytest.mark.parametrize(
    ("recipe", "plan"),
    [*GOOD, *(pytest.param(*case, marks=pytest.mark.full) for case in GOOD_TOO)],
)
def test_what_only_looks_bad_trains_what_one_process_would(
    shoal: Shoal, recipe: str, plan: str
) -> None:
    code, errors = shoal("verify", f"{RECIPES}:{recipe}", "--plan", plan, "--steps", "3")
    assert code == 0, errors
    assert "SAME" in errors or "WITHIN ROUNDING" in errors
