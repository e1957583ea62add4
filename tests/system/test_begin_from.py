"""`shoal train --from`: a run begins with the weights, or everything, of another."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.testing.ranks import Pool
from tests.support import faults
from tests.support.faults import Trained, Training

TINY = str(Path(__file__).parents[1] / "faults" / "tiny.py")
Train = Callable[..., Trained]


@pytest.fixture(scope="module")
def first(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 20 steps."""
    run_dir = tmp_path_factory.mktemp("first") / "run"
    settings = {"pause": 0, "steps": 20}
    trained = faults.start(pool, f"{TINY}:mlp", run_dir, plan="data=2", settings=settings).wait()
    assert trained.exit_code == 0, trained.errors
    return run_dir


@pytest.fixture
def train(pool: Pool, tmp_path: Path) -> Train:
    def train(source: Path | str, *words: str, steps: int, plan: str = "data=2") -> Trained:
        number = len(list(tmp_path.glob("*.out")))
        options = ("--from", str(source), *words)
        settings = {"pause": 0, "steps": steps}
        run_dir = tmp_path / f"run-{number}"
        return faults.start(
            pool, f"{TINY}:mlp", run_dir, plan=plan, settings=settings, options=options
        ).wait()

    return train


def checkpoint(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "step-00000020"


def test_everything_goes_on_in_a_new_run(train: Train, first: Path, pool: Pool) -> None:
    trained = train(checkpoint(first), "--take", "everything", steps=30)
    assert trained.exit_code == 0, trained.errors
    assert [record["step"] for record in trained.steps()] == list(range(21, 31))
    assert "everything of" in trained.errors
    whole_dir = trained.run_dir.with_name("whole")
    settings = {"pause": 0, "steps": 30}
    whole = faults.start(pool, f"{TINY}:mlp", whole_dir, plan="data=2", settings=settings).wait()
    assert trained.model() == whole.model()


@pytest.mark.quick("data=2", "pipeline=2")
@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=3", "pipeline=2", "data=2 sync=server"])
def test_weights_alone_begin_at_step_1(train: Train, first: Path, plan: str) -> None:
    """A rate of 0 would not do: AdamW's first step moves each weight by the rate."""
    trained = train(checkpoint(first), steps=1, plan=plan)
    assert trained.exit_code == 0, trained.errors
    before, after = (load_file(d / "model.safetensors") for d in (first, trained.run_dir))
    for name in ("0.weight", "4.weight"):
        assert not torch.equal(before[name], after[name])
        assert (before[name] - after[name]).abs().max() < 0.0101
    assert [record["step"] for record in trained.steps()] == [1]


@pytest.mark.full
def test_a_finished_model_does_as_well(train: Train, first: Path) -> None:
    of_model = train(first / "model.safetensors", steps=2)
    of_checkpoint = train(checkpoint(first), steps=2)
    assert of_model.exit_code == of_checkpoint.exit_code == 0, of_model.errors
    assert of_model.model() == of_checkpoint.model()


def test_what_does_not_match_is_refused_or_listed(
    train: Train, first: Path, tmp_path: Path
) -> None:
    tensors = load_file(first / "model.safetensors")
    tensors["4.weight"] = torch.zeros(2, 16)
    tensors["strange"] = torch.zeros(3)
    del tensors["0.bias"]
    tensors["0.weight"] = tensors["0.weight"].to(torch.bfloat16)
    other = tmp_path / "other.safetensors"
    save_file(tensors, other)
    refused = train(other, steps=2)
    assert refused.exit_code == 2
    for words in ("not in it: 0.bias", "not in the model: strange", "another shape: 4.weight"):
        assert words in refused.last_words
    assert "--partial" in refused.last_words
    partly = train(other, "--partial", steps=2)
    assert partly.exit_code == 0, partly.errors
    assert "not in the model: strange" in partly.errors
    nothing = tmp_path / "nothing.safetensors"
    save_file({"x": torch.zeros(1)}, nothing)
    assert "no tensor in common" in train(nothing, "--partial", steps=2).last_words


def test_fractions_do_not_become_whole_numbers(train: Train, first: Path, tmp_path: Path) -> None:
    """Nor the other way round: what was rounded, or counted, is another thing."""
    tensors = load_file(first / "model.safetensors")
    tensors["1.num_batches_tracked"] = tensors["1.num_batches_tracked"].float() + 0.5
    tensors["0.weight"] = tensors["0.weight"].to(torch.int64)
    save_file(tensors, tmp_path / "whole")  # a file is what it holds, whatever it is called
    refused = train(tmp_path / "whole", steps=2)
    assert refused.exit_code == 2
    assert "of another kind of numbers: 0.weight, 1.num_batches_tracked" in refused.last_words


def test_of_a_run_the_newest_good_checkpoint_is_taken(
    train: Train, first: Path, tmp_path: Path
) -> None:
    run = tmp_path / "copy"
    shutil.copytree(first, run)
    newer = run / "checkpoints" / "step-00000025"
    shutil.copytree(checkpoint(run), newer)
    content = bytearray((newer / "rank-00000.safetensors").read_bytes())
    content[-3] ^= 16
    (newer / "rank-00000.safetensors").write_bytes(content)
    trained = train(f"file://{run}", "--take", "everything", steps=22)
    assert trained.exit_code == 0, trained.errors
    assert "step-00000025 was passed over: rank-00000.safetensors: the bytes" in trained.errors
    assert f"beginning with everything of {checkpoint(run)}" in trained.errors
    assert [record["step"] for record in trained.steps()] == [21, 22]


def test_a_place_in_other_data_means_nothing(train: Train, first: Path) -> None:
    words = ("--take", "everything", "--set", "batch_size=6")
    refused = train(checkpoint(first), *words, steps=30)
    assert refused.exit_code == 2
    assert "batch_size was 12 and is 6 now, so the place in the data" in refused.last_words


def test_a_run_that_was_killed_begins_again_with_the_same_weights(
    pool: Pool, first: Path, tmp_path: Path
) -> None:
    """Before its first checkpoint; afterwards it goes on, and needs the source no more."""
    source = tmp_path / "weights.safetensors"
    shutil.copy(first / "model.safetensors", source)

    def run(name: str, *options: str, pause: float = 0.02) -> Training:
        return faults.start(
            pool,
            f"{TINY}:mlp",
            tmp_path / name,
            plan="data=2",
            settings={"pause": pause, "steps": 20},
            options=options,
        )

    training = run("run", "--from", str(source), "--resume")
    training.wait_for_step(2)
    training.command.send_signal(signal.SIGKILL)
    training.wait()
    other = run("run", "--from", str(first), "--resume").wait()
    assert other.exit_code == 2 and f"the run began with {source}" in other.last_words
    trained = run("run", "--resume").wait()
    assert trained.exit_code == 0 and f"tensors of {source}" in trained.errors, trained.errors
    whole = run("whole", "--from", str(source)).wait()
    assert trained.model() == whole.model()
    source.unlink()
    done = run("run", "--from", str(source), "--resume").wait()
    assert done.exit_code == 0 and "were done already" in done.last_words


def test_wrong_words(train: Train, first: Path, tmp_path: Path) -> None:
    model = first / "model.safetensors"
    assert "holds weights alone" in train(model, "--take", "everything", steps=2).last_words
    assert "There is no" in train(tmp_path / "absent", steps=2).last_words
    broken = tmp_path / "step-00000020"
    shutil.copytree(checkpoint(first), broken)
    (broken / "manifest.json").write_bytes(b"{}")
    wrong = train(broken, steps=2)
    assert wrong.exit_code == 2 and "manifest.json" in wrong.last_words
