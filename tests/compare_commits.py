"""Does this tree train what another commit trained? For changes that must not change anything.

    make compare BASE=main~5           # or: python tests/compare_commits.py main~5 [--quick]

Checks out the other commit as a git worktree and runs both, one after the other on this machine:
every recipe under unlike plans, a run that is stopped and goes on, shards, and the verdict of
`shoal verify`. Weights must be equal byte for byte, metrics equal but for times, and JSON objects
must have the same fields and the same values where these do not depend on the clock. What the
other commit has written (checkpoints, shards) must load here. A field that only this tree has is
listed and allowed: output may grow. Hashes are not stored, since they differ from CPU to CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Depend on the clock, the machine or the place.
LOOSE = {
    *("time", "times", "ranks", "pid", "ms", "samples_per_s", "peak_memory_bytes", "seconds"),
    *("run_dir", "model", "bytes_sent", "predicted", "measured", "speed", "environment"),
}
STEPS = "6"


class Cell(NamedTuple):
    """A recipe under a plan. Out of lockstep the order of updates differs from run to run."""

    recipe: str
    plan: str
    settings: tuple[str, ...] = ()
    is_exact: bool = True


CHARLM, DIGITS = "recipes/charlm.py:small", "recipes/digits.py:small"
SPELLING, MOVIELENS = "recipes/spelling.py:small", "recipes/movielens.py:small"
SMALL_GPT = ("layers=2", "width=32")
CELLS = [
    Cell(DIGITS, "data=1"),
    Cell(DIGITS, "data=2 accumulate=2"),
    Cell(CHARLM, "data=2 zero=1", SMALL_GPT),
    Cell(CHARLM, "data=2 zero=3", SMALL_GPT),
    Cell(CHARLM, "tensor=2", SMALL_GPT),
    Cell(CHARLM, "pipeline=2 microbatches=4", SMALL_GPT),
    Cell(SPELLING, "data=2 sums=ring"),
    Cell(SPELLING, "data=2 local_steps=2 outer=nesterov codec=int8"),
    Cell(DIGITS, "data=2 sync=server servers=2"),
    Cell(MOVIELENS, "data=2 sync=server servers=2"),
    Cell(DIGITS, "data=2 sync=server staleness=2", is_exact=False),
    Cell(CHARLM, "data=2 precision=bf16 recompute=blocks", SMALL_GPT),
    Cell(CHARLM, "pipeline=2 tensor=2", SMALL_GPT),
    Cell(DIGITS, "data=2 zero=2 offload=optimizer"),
]
QUICK = [CELLS[1], CELLS[4], CELLS[8]]


class Tree(NamedTuple):
    """A checkout and where its runs go."""

    root: Path
    runs: Path

    def shoal(self, *words: str) -> tuple[int, list[str]]:
        """Run the command; its exit code, and the lines of standard output."""
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src")}
        done = subprocess.run(
            [sys.executable, "-m", "shoal", *words],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode not in (0, 1):
            sys.stderr.write(done.stderr)
        return done.returncode, done.stdout.splitlines()

    def train(self, cell: Cell, name: str, *words: str, steps: str = STEPS) -> dict[str, Any]:
        """A run in the directory `name`; the object that --json prints."""
        chosen = [word for setting in cell.settings for word in ("--set", setting)]
        where = ["--run-dir", str(self.runs / name), "--set", f"steps={steps}", "--json"]
        plan = [] if "--resume" in words else ["--plan", cell.plan]
        code, lines = self.shoal("train", cell.recipe, *plan, *chosen, *where, *words)
        return {"code": code} | (json.loads(lines[-1]) if lines else {})


def without_loose(value: Any) -> Any:
    """A value without the fields that may differ between two runs of one commit."""
    if isinstance(value, dict):
        return {k: without_loose(v) for k, v in value.items() if k not in LOOSE}
    return [without_loose(item) for item in value] if isinstance(value, list) else value


def differences(before: Any, after: Any, where: str) -> Iterator[str]:
    """What of `before` is missing or other in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key not in after:
                yield f"{where}.{key} is gone"
            else:
                yield from differences(value, after[key], f"{where}.{key}")
    elif before != after:
        yield f"{where}: {before!r} became {after!r}"


def lines_of(path: Path) -> list[Any]:
    return [without_loose(json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def compare_runs(before: Tree, after: Tree, name: str, is_exact: bool) -> Iterator[str]:
    """What two run directories leave behind."""
    one, other = before.runs / name, after.runs / name
    missing = {p.name for p in one.iterdir()} - {p.name for p in other.iterdir()}
    yield from (f"{name}/{file} is gone" for file in sorted(missing))
    if is_exact:
        if (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes():
            yield f"{name}: the weights differ"
        steps = zip(lines_of(one / "metrics.jsonl"), lines_of(other / "metrics.jsonl"), strict=True)
        for old, new in steps:
            yield from differences(old, new, f"{name}/metrics[{old['step']}]")
    facts = [without_loose(json.loads((run / "run.json").read_text())) for run in (one, other)]
    yield from differences(facts[0], facts[1], f"{name}/run.json")
    kinds = [{line["event"] for line in lines_of(run / "events.jsonl")} for run in (one, other)]
    yield from (f"{name}: no event {kind!r} any more" for kind in sorted(kinds[0] - kinds[1]))


def compare_cell(before: Tree, after: Tree, cell: Cell, number: int) -> Iterator[str]:
    name = f"run-{number}"
    old, new = before.train(cell, name), after.train(cell, name)
    if not cell.is_exact:
        old, new = (dict.fromkeys(answer) for answer in (old, new))
    yield from differences(without_loose(old), without_loose(new), f"{cell.plan}: --json")
    yield from compare_runs(before, after, name, cell.is_exact)


def compare_resumed(before: Tree, after: Tree) -> Iterator[str]:
    """A run of the other commit goes on, in copies, there and here; and under another plan."""
    cell = Cell(CHARLM, "data=2 zero=1", SMALL_GPT)
    before.train(cell, "stopped")
    for tree, name in ((before, "there"), (after, "here")):
        subprocess.run(["cp", "-r", before.runs / "stopped", tree.runs / "resumed"], check=True)
        answer = tree.train(cell, "resumed", "--resume", steps="9")
        if answer["code"]:
            yield f"resume: the run does not go on {name}: {answer}"
    yield from compare_runs(before, after, "resumed", is_exact=True)
    subprocess.run(["cp", "-r", before.runs / "stopped", after.runs / "other"], check=True)
    answer = after.train(cell, "other", "--resume", "--plan", "tensor=2", steps="9")
    if answer["code"]:
        yield f"resume: a checkpoint does not load under tensor=2: {answer}"


def compare_shards(before: Tree, after: Tree) -> Iterator[str]:
    """Shards that the other commit built are those that this one builds, and verify here."""
    for tree in (before, after):
        out = str(tree.runs / "shards")
        tree.shoal("data", "build", DIGITS, out)
    if after.shoal("data", "verify", str(before.runs / "shards"))[0]:
        yield "shards of the other commit do not verify here"
    for path in sorted((before.runs / "shards").rglob("*")):
        twin = after.runs / "shards" / path.relative_to(before.runs / "shards")
        if path.is_file() and (not twin.exists() or path.read_bytes() != twin.read_bytes()):
            yield f"shards: {path.name} differs"


def compare_verdicts(before: Tree, after: Tree, cells: list[Cell]) -> Iterator[str]:
    for cell in cells:
        chosen = [word for setting in cell.settings for word in ("--set", setting)]
        words = ("verify", cell.recipe, "--plan", cell.plan, "--steps", "2", *chosen)
        (old_code, old), (new_code, new) = before.shoal(*words), after.shoal(*words)
        if (old_code, old) != (new_code, new):
            yield f"verify {cell.plan}: {old_code} {old} became {new_code} {new}"


def compare(base: str, cells: list[Cell]) -> list[str]:
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="shoal-compare-") as folder:
        there = Tree(Path(folder, "base"), Path(folder, "runs-base"))
        here = Tree(ROOT, Path(folder, "runs-here"))
        there.runs.mkdir()
        here.runs.mkdir()
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(there.root), base], check=True)
        try:
            parts = [
                *((cell.plan, compare_cell(there, here, cell, n)) for n, cell in enumerate(cells)),
                ("resume", compare_resumed(there, here)),
                ("shards", compare_shards(there, here)),
                ("verdicts", compare_verdicts(there, here, cells)),
            ]
            for name, part in parts:
                wrong = list(part)
                print(f"{'DIFFERENT' if wrong else 'same':9}  {name}", *wrong, sep="\n    ")
                found += wrong
        finally:
            subprocess.run([*git, "remove", "--force", str(there.root)], check=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a commit, a branch or a tag")
    parser.add_argument("--quick", action="store_true", help="three plans instead of all")
    arguments = parser.parse_args()
    found = compare(arguments.base, QUICK if arguments.quick else CELLS)
    print(f"{len(found)} differences" if found else "the same")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
