"""`shoal distill`, `prune`, `quantize` and `pack`: tables, files that load, and bad input."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import shoal
from shoal.cli.main import run_here
from shoal.formats.import_weights import import_weights, target_model
from shoal.formats.weights import ModelWeights
from shoal.slim.results import weights_in
from shoal.testing.ranks import Pool
from shoal.training.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RECIPE = f"{Path(__file__).with_name('slim_recipes.py')}:small"
full = pytest.mark.full


class Done(NamedTuple):
    exit_code: int
    output: str
    errors: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output.splitlines()[-1])
        return found


Command = Callable[..., Done]


@pytest.fixture
def command(pool: Pool, tmp_path: Path) -> Command:
    """A command in a fork of the pool's warm process."""

    def run(*words: object) -> Done:
        output, errors = tmp_path / ".output", tmp_path / ".errors"
        for path in (output, errors):
            path.write_bytes(b"")
        job = pool.start(
            run_here,
            [str(word) for word in words],
            output=output,
            errors=errors,
            directory=tmp_path,
        )
        return Done(job.wait(), output.read_text(), errors.read_text())

    return run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights of the recipe's model, as a checkpoint."""
    model = load_recipe(RECIPE, {}).make_model()
    weights = ModelWeights(weights_in(model))
    import_weights(weights, target_model(weights, model), tmp_path / "weights", RECIPE)
    return tmp_path / "weights"


def left(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".output", ".errors"}


def check_table(found: dict[str, Any], out: Path) -> None:
    assert found["exit_code"] == 0 and found["out"] == str(out)
    for column in ("before", "after"):
        figures = found[column]
        assert figures["bytes"] > 0 and figures["parameters"] > 0 and figures["latency_ms"] > 0
        assert set(figures["metrics"]) == {"loss", "accuracy"}


@pytest.mark.parametrize("how", ["magnitude", pytest.param("2:4", marks=full)])
def test_pruned_weights_load_again(
    command: Command, checkpoint: Path, tmp_path: Path, how: str
) -> None:
    out, share = tmp_path / "sparse", ("--sparsity", 0.5) if how == "magnitude" else ()
    words = ("prune", RECIPE, "--from", checkpoint, "--how", how, *share, "--out", out, "--json")
    done = command(*words)
    assert done.exit_code == 0, done.errors
    check_table(done.json, out)
    assert done.json["sparsity"] == pytest.approx(0.5, abs=0.01) and done.json["kept"] == []
    model = shoal.load(out, RECIPE)
    zeros = sum(int((p == 0).sum()) for p in model.parameters() if p.dim() > 1)
    assert zeros == pytest.approx(
        0.5 * sum(p.numel() for p in model.parameters() if p.dim() > 1), 1
    )
    assert left(tmp_path) == {"weights", "sparse"}
    again = command(*words)
    assert again.exit_code == 2 and "is there already" in again.errors


@full
def test_a_smaller_model_is_a_program(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "less.pt2", tmp_path / "less"):
        done = command(
            *("prune", RECIPE, "--from", checkpoint, "--how", "structured", "--sparsity", 0.5),
            *("--out", out, "--json"),
        )
        assert done.exit_code == 0, done.errors
        check_table(done.json, out)
        before, after = (done.json[column]["parameters"] for column in ("before", "after"))
        assert after < before and done.json["sparsity"] == pytest.approx(1 - after / before)
        assert done.json["kept"] == ["4"]
        assert shoal.load(out)(torch.randn(5, 16)).shape == (5, 4)
        assert shoal.load(out, RECIPE)(torch.randn(5, 16)).shape == (5, 4)


@full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["magnitude", "movement", "structured"])
def test_pruning_while_it_trains(
    command: Command, checkpoint: Path, tmp_path: Path, how: str
) -> None:
    done = command(
        *("prune", RECIPE, "--from", checkpoint, "--how", how, "--sparsity", 0.75, "--train"),
        *("--plan", "data=2", "--run-dir", tmp_path / "run", "--out", tmp_path / "out", "--json"),
    )
    assert done.exit_code == 0, done.errors
    check_table(done.json, tmp_path / "out")
    assert done.json["after"]["metrics"]["loss"] < done.json["before"]["metrics"]["loss"]
    if how != "structured":
        assert done.json["sparsity"] == pytest.approx(0.75, abs=0.01)
        trained = command("checkpoint", "show", tmp_path / "run")
        assert "parametrizations" in trained.output
        shoal.load(tmp_path / "out", RECIPE)


@full
@pytest.mark.timeout(300)
def test_pruning_goes_on_where_it_was_stopped(
    command: Command, checkpoint: Path, tmp_path: Path
) -> None:
    words = ("prune", RECIPE, "--from", checkpoint, "--how", "movement", "--sparsity", 0.75)
    words += ("--plan", "data=2", "--set", "pause=0.2")
    place = ("--run-dir", tmp_path / "run", "--out", tmp_path / "out")
    told = [str(word) for word in (*words, *place)]
    whole = command(*words, "--run-dir", tmp_path / "whole", "--out", tmp_path / "other")
    assert whole.exit_code == 0, whole.errors
    stopped = subprocess.Popen(
        [sys.executable, "-P", "-m", "shoal", *told],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert stopped.stderr is not None
    for line in stopped.stderr:
        if line.startswith("step 1/"):
            stopped.send_signal(signal.SIGTERM)
    assert stopped.wait() == 75 and not (tmp_path / "out").exists()
    again = command(*words, *place, "--resume")
    assert again.exit_code == 0, again.errors
    one, other = (shoal.load(tmp_path / name, RECIPE) for name in ("out", "other"))
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("to", ["int8", "int4", "dynamic-int8", "qat-int8"])
@pytest.mark.parametrize("suffix", ["", ".safetensors", ".pt2"])
def test_quantised_models_load_again(
    command: Command, checkpoint: Path, tmp_path: Path, to: str, suffix: str
) -> None:
    if to == "qat-int8" and suffix:
        pytest.skip("written as dynamic-int8 is")
    out = tmp_path / f"rounded{suffix}"
    done = command("quantize", RECIPE, "--from", checkpoint, "--to", to, "--out", out, "--json")
    assert done.exit_code == 0, done.errors
    check_table(done.json, out)
    assert done.json["kept"] == (["0", "4"] if to == "int4" else [])
    if suffix != ".pt2":
        assert done.json["after"]["bytes"] < done.json["before"]["bytes"]
    model = shoal.load(out) if suffix == ".pt2" else shoal.load(out, RECIPE)
    with torch.no_grad():
        assert model(torch.randn(5, 16)).shape == (5, 4)


@full
@pytest.mark.timeout(300)
def test_a_model_of_transformers_loads_with_from_pretrained(
    command: Command, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()  # which leaves a thread behind
    recipe = RECIPE.replace(":small", ":llama")
    load_recipe(recipe, {}).make_model().save_pretrained(tmp_path / "plain")
    begin = ("--from", tmp_path / "plain", "--json")
    for out, words in {
        "sparse": ("prune", recipe, *begin, "--sparsity", 0.5),
        "int8": ("quantize", recipe, *begin, "--to", "int8"),
        "int4": ("quantize", recipe, *begin, "--to", "int4"),
    }.items():
        done = command(*words, "--out", tmp_path / out)
        assert done.exit_code == 0, done.errors
        assert out == "sparse" or "from_pretrained loads it" in done.json["notes"][0]
        assert done.json["kept"][0] == "model.embed_tokens"
        kind = transformers.LlamaForCausalLM
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            own = shoal.load(tmp_path / out)(tokens).logits
            assert kind.from_pretrained(tmp_path / out)(tokens).logits.equal(own)
            assert shoal.load(tmp_path / out, recipe)(tokens).logits.equal(own)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words", [(), pytest.param(("--hidden", "1=1", "--cache", "c"), marks=full)]
)
def test_a_student_learns_from_a_teacher(
    command: Command, checkpoint: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = command(
        *("distill", RECIPE, "--set", "width=8", "--set", "steps=20", "--teacher", checkpoint),
        *("--plan", "data=2", "--run-dir", tmp_path / "run", "--out", tmp_path / "out", "--json"),
        *words,
    )
    assert done.exit_code == 0, done.errors
    check_table(done.json, tmp_path / "out")
    assert done.json["teacher"] == str(checkpoint)
    assert done.json["after"]["parameters"] < done.json["before"]["parameters"]
    shoal.load(tmp_path / "out", RECIPE, settings={"width": 8})


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        *(pytest.param(plan, marks=full) for plan in ("data=2 precision=bf16", "pipeline=2")),
    ],
)
def test_a_teacher_apart_gives_the_same_student(
    command: Command, checkpoint: Path, tmp_path: Path, plan: str
) -> None:
    words = ("distill", RECIPE, "--set", "width=8", "--set", "steps=20", "--teacher", checkpoint)
    found = []
    for run, apart in (("one", ()), ("two", ("--teachers", 2)), ("one", ("--teachers", 1))):
        out, goes_on = tmp_path / f"out{len(found)}", ("--resume",) if len(found) == 2 else ()
        place = ("--run-dir", tmp_path / run, "--out", out, "--json")
        done = command(*words, "--plan", plan, *place, *apart, *goes_on)
        assert done.exit_code == 0, done.errors
        found.append(shoal.load(out, RECIPE, settings={"width": 8}).state_dict())
    for other in found[1:]:
        assert all(map(torch.equal, found[0].values(), other.values()))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", ["worker", "keeper"])
def test_a_teacher_that_dies(
    command: Command, checkpoint: Path, tmp_path: Path, which: str
) -> None:
    words = ("train", RECIPE.replace(":small", ":taught"), "--set", f"teacher={checkpoint}")
    words += ("--plan", "data=2", "--json", "--set", "save_every=5")
    kill = command(*words, "--set", f"kill={which}", "--run-dir", tmp_path / "run")
    if which == "worker":
        assert kill.exit_code == 0, kill.errors
    else:
        assert kill.exit_code == 1
        assert "The processes of the teacher are gone" in kill.errors
        resumed = command(*words, "--run-dir", tmp_path / "run", "--resume")
        assert resumed.exit_code == 0, resumed.errors
    whole = command(*words, "--run-dir", tmp_path / "whole")
    one, other = (
        shoal.load(tmp_path / name, RECIPE, settings={"width": 8}) for name in ("run", "whole")
    )
    assert whole.exit_code == 0
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_a_pack_is_loaded_and_unpacked(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    done = command("pack", checkpoint, "--out", pack, "--json")
    assert done.exit_code == 0, done.errors
    assert done.json["verified"] is True and done.json["exit_code"] == 0
    assert done.json["bytes_after"] == pack.stat().st_size < done.json["bytes_before"]
    model, plain = shoal.load(pack, RECIPE), shoal.load(checkpoint, RECIPE)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert command("pack", pack, "--unpack", "--out", tmp_path / "again").exit_code == 0
    for file in checkpoint.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    assert left(tmp_path) == {"weights", "pack", "again"}


def test_bad_input_is_one_sentence(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    file = damaged / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    (tmp_path / "cut").write_bytes(b"shoalpk1" + b"0" * 50)
    prune = ("prune", RECIPE, "--out", tmp_path / "out", "--from", checkpoint)
    cases = {
        "above 0 and below 1": (*prune, "--sparsity", 1),
        "no such way to prune": (*prune, "--sparsity", 0.5, "--how", "magic"),
        "Add --train": (*prune, "--sparsity", 0.5, "--plan", "data=2"),
        "no such form": ("quantize", *prune[1:], "--to", "int3"),
        "which does not train": ("quantize", *prune[1:], "--to", "int8", "--plan", "data=2"),
        "are not those that were written": (*prune[:4], "--from", damaged, "--sparsity", 0.5),
        "rank-00000.safetensors: the bytes": (
            *("distill", RECIPE, "--teacher", damaged, "--teachers", 1),
            *("--run-dir", tmp_path / "run", "--out", tmp_path / "out"),
        ),
        "damaged is bad": ("pack", damaged, "--out", tmp_path / "out"),
        "damaged pack": ("pack", tmp_path / "cut", "--unpack", "--out", tmp_path / "out"),
        "There is no": ("pack", tmp_path / "none", "--out", tmp_path / "out"),
    }
    for words, case in cases.items():
        check_refused(command(*case), words)
    assert left(tmp_path) == {"weights", "damaged", "cut"}


def check_refused(done: Done, words: str) -> None:
    assert done.exit_code == 2, done
    assert words in done.errors and "Traceback" not in done.errors and not done.output


def test_a_failure_is_an_object_too_and_leaves_nothing(
    command: Command, checkpoint: Path, tmp_path: Path
) -> None:
    out = ("--from", checkpoint, "--out", tmp_path / "out", "--json")
    done = command("prune", RECIPE, *out, "--sparsity", 2)
    assert done.exit_code == done.json["exit_code"] == 2
    assert done.json["error"].startswith("--sparsity 2: ")
    unmeasured = RECIPE.replace(":small", ":unmeasured")
    done = command("prune", unmeasured, *out, "--sparsity", 0.5)
    assert done.exit_code == done.json["exit_code"] == 1
    assert done.json["error"] == "ValueError: no number"
    assert "slim_recipes.py" in done.errors and "slim/figures.py" not in done.errors
    assert left(tmp_path) == {"weights"}


@full
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--alpha", 2), "alpha=2"),
        (("--set", "classes=3"), "it gives [2, 4], and the student [2, 3]"),
        (("--hidden", "one=1"), "has no layer 'one'"),
        (("--plan", "data=3"), "batch"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    command: Command, checkpoint: Path, tmp_path: Path, words: tuple[object, ...], told: str
) -> None:
    place = ("--out", tmp_path / "out", "--run-dir", tmp_path / "run", "--teacher", checkpoint)
    check_refused(command("distill", RECIPE, *place, *words), told)
    assert not (tmp_path / "out").exists()
