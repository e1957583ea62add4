"""`shoal data audit`, and going on with the samples that a run has not seen."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shoal.cli.main import run_here
from shoal.testing.ranks import Pool
from shoal.training.lineage import audit_run, batches_of, read_record, seen_in
from tests.support import faults
from tests.support.faults import Trained

TINY = str(Path(__file__).parents[1] / "faults" / "tiny.py")
Train = Callable[..., Trained]


@pytest.fixture
def train(pool: Pool, tmp_path: Path) -> Train:
    def train(name: str, *options: str, plan: str = "data=2", **settings: object) -> Trained:
        started = faults.start(
            pool, f"{TINY}:growing", tmp_path / name, plan=plan, settings=settings, options=options
        )
        return started.wait()

    return train


def ids_of(run_dir: Path, num_samples: int) -> list[int]:
    record = read_record(run_dir)
    batches = batches_of(record, range(num_samples))
    return [int(i) for step in record.steps for i in batches.at(step["step"] - 1).ids]


def test_new_data_is_what_no_run_before_has_seen(train: Train, tmp_path: Path) -> None:
    first = train("first", samples=40, steps=4)
    assert first.exit_code == 0, first.errors
    old = ids_of(first.run_dir, 40)
    second = train("second", "--new-data", str(first.run_dir), samples=64, steps=4)
    assert second.exit_code == 0, second.errors
    new = ids_of(second.run_dir, 64)
    assert len(set(old)) == len(set(new)) == 32
    assert sorted({*old, *new}) == list(range(64))
    assert "beginning with" in second.errors  # its weights come with it

    third = train(
        "third", "--new-data", str(second.run_dir), "--replay", "0.5", samples=96, steps=8
    )
    assert third.exit_code == 0, third.errors
    mixed = ids_of(third.run_dir, 96)
    assert 20 <= sum(i < 64 for i in mixed) <= 44
    assert all(seen_in(read_record(third.run_dir), range(96))[:64])

    nothing = train("none", "--new-data", str(second.run_dir), samples=64)
    assert nothing.exit_code == 2
    assert "All 64 samples were seen" in nothing.errors


@pytest.mark.full
@pytest.mark.parametrize("plan", ["data=2", "data=2 sync=server staleness=1"])
def test_what_was_seen_in_another_order_is_refused(train: Train, plan: str) -> None:
    """By its marks, and by the order's name where there are none."""
    first = train("first", plan=plan, samples=40, steps=2)
    assert first.exit_code == 0, first.errors
    new = ("--new-data", str(first.run_dir))
    other = train("other", *new, plan=plan, samples=64, in_order=True)
    assert other.exit_code == 2 and "in another order than its recipe gives today" in other.errors
    second = train("second", *new, plan=plan, samples=64, steps=2)
    assert second.exit_code == 0, second.errors


def test_a_resumed_run_goes_on_with_the_same_new_data(train: Train) -> None:
    """Although the run before went on meanwhile, and has seen more."""
    first = train("first", samples=40, steps=2)
    new = ("--new-data", str(first.run_dir))
    whole = train("whole", *new, samples=80, steps=6)
    train("parts", *new, samples=80, steps=3)
    assert train("first", "--resume", samples=40, steps=4).exit_code == 0
    parts = train("parts", "--resume", samples=80, steps=6)
    assert parts.exit_code == 0, parts.errors
    assert parts.model() == whole.model()
    assert ids_of(parts.run_dir, 80) == ids_of(whole.run_dir, 80)
    found = audit_run(read_record(parts.run_dir), range(80))
    assert not found.problems and found.num_marked == 6
    # What is new is another thing once a step of the run before is no longer on record.
    lines = (first.run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (first.run_dir / "metrics.jsonl").write_text("".join(lines[:1]))
    other = train("parts", "--resume", samples=80, steps=8)
    assert other.exit_code == 2, other.errors
    assert "order of new and replayed samples was Some" in other.errors


@pytest.mark.quick("pipeline=2")
@pytest.mark.parametrize("plan", ["data=2 local_steps=2", "tensor=2", "pipeline=2"])
def test_every_plan_keeps_a_ledger(train: Train, plan: str) -> None:
    trained = train("run", plan=plan, steps=5, samples=40)
    assert trained.exit_code == 0, trained.errors
    faults.check_ledger(trained, 5)


def test_audit(train: Train, pool: Pool, tmp_path: Path) -> None:
    trained = train("run", samples=40, steps=5)

    def audit(*words: str) -> tuple[int, str]:
        number = len(list(tmp_path.iterdir()))
        told = [tmp_path / f"audit-{number}{end}" for end in (".out", ".err")]
        command = pool.start(
            run_here,
            ["data", "audit", str(trained.run_dir), *words],
            environment={},
            output=told[0],
            errors=told[1],
            directory=tmp_path,
        )
        return command.wait(30), "".join(path.read_text() for path in told)

    code, told = audit()
    assert code == 0, told
    assert "5 steps checked" in told
    assert "5 steps were made of the samples that the order gives" in told
    path = trained.run_dir / "metrics.jsonl"
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    lines[2]["mark"] += 1
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    code, told = audit("--json")
    assert code == 1
    problems = msgspec.json.decode(told)["problems"]
    assert problems == ["step 3: other samples were trained on than the order gives"]
    path.unlink()
    code, told = audit()
    assert (code, "metrics.jsonl is missing" in told) == (2, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--replay", "0.5"), "--replay has no effect without --new-data"),
        (("--new-data", "nowhere"), "is no run directory"),
    ],
)
def test_what_cannot_be_is_refused(train: Train, words: tuple[str, ...], told: str) -> None:
    refused = train("run", *words)
    assert refused.exit_code == 2
    assert told in refused.errors
