"""`shoal evaluate`, `predict` and `generate`: what they answer, write and refuse."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import shoal
from shoal.cli.main import run_here
from shoal.errors import UsageError
from shoal.testing.ranks import Pool
from tests.support import faults
from tests.support.faults import LIMIT_S
from tests.support.hosts import run_in
from tests.support.leaks import wait_until
from tests.system import used

USED = used.__file__
CLASSIFIER, CHARACTERS = f"{USED}:classifier", f"{USED}:characters"


class Said(NamedTuple):
    code: int
    out: str
    errors: str

    @property
    def answer(self) -> dict:
        return json.loads(self.out.splitlines()[-1])


Command = Callable[..., Said]


@pytest.fixture
def command(pool: Pool, tmp_path: Path) -> Command:
    """Run `shoal` in a directory of its own, which holds nothing else."""

    def run(*words: object) -> Said:
        place = tmp_path / "work"
        place.mkdir(exist_ok=True)
        out, errors = tmp_path / "said.out", tmp_path / "said.err"
        started = pool.start(
            run_in,
            "",
            [str(word) for word in words],
            environment={},
            output=out,
            errors=errors,
            directory=place,
        )
        code = started.wait(LIMIT_S)
        return Said(code, out.read_text(), errors.read_text())

    return run


class Finished(NamedTuple):
    run_dir: Path
    evaluation: dict[str, float]


@pytest.fixture(scope="module")
def classified(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run_dir = tmp_path_factory.mktemp("classified") / "run"
    trained = faults.start(pool, CLASSIFIER, run_dir, plan="data=2").wait()
    assert trained.exit_code == 0, trained.errors
    return Finished(run_dir, trained.result["evaluation"])


@pytest.fixture(scope="module")
def written(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("written") / "run"
    trained = faults.start(pool, CHARACTERS, run_dir, plan="data=1").wait()
    assert trained.exit_code == 0, trained.errors
    return run_dir


# ---- evaluate


def test_an_evaluation_has_the_bits_of_training(command: Command, classified: Finished) -> None:
    words = ("--from", classified.run_dir, "--plan", "data=3", "--json")
    said = command("evaluate", CLASSIFIER, *words)
    assert said.code == 0, said.errors
    answer = said.answer
    assert {"loss": answer["loss"], **answer["metrics"]} == classified.evaluation
    assert (answer["samples"], answer["exit_code"]) == (101, 0)


@pytest.mark.full
def test_a_program_and_quantised_weights_are_evaluated(
    command: Command, classified: Finished, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    for name in ("rounded", "program.pt2"):
        out = tmp_path / name
        table = shoal.slim.quantize(CLASSIFIER, classified.run_dir, to="int8", out=out)
        said = command("evaluate", CLASSIFIER, "--from", out, "--plan", "data=2", "--json")
        assert said.code == 0, said.errors
        assert {"loss": said.answer["loss"], **said.answer["metrics"]} == pytest.approx(
            table.after.metrics, rel=1e-5
        )
    refused = command("evaluate", CLASSIFIER, "--from", out, "--plan", "tensor=2", "--json")
    assert refused.code == 2 and "under data=N" in refused.answer["error"]


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [
        *("data=1", "data=4 zero=1", "data=2 zero=2", "data=2 zero=3", "data=2 local_steps=2"),
        *("data=2 sync=server", "data=2 sync=server servers=2 staleness=1"),
        "data=2 precision=bf16",
        *("pipeline=2", "data=2 recompute=blocks", "tensor=2", "data=2 tensor=2"),
    ],
)
def test_an_evaluation_under_any_plan(command: Command, classified: Finished, plan: str) -> None:
    said = command("evaluate", CLASSIFIER, "--from", classified.run_dir, "--plan", plan, "--json")
    assert said.code == 0, said.errors
    found = {"loss": said.answer["loss"], **said.answer["metrics"]}
    if "precision" in plan or "tensor" in plan:  # which sum or round otherwise
        assert found == pytest.approx(classified.evaluation, rel=0.05)
    else:
        assert found == classified.evaluation


def test_ranks_evaluate_tables(command: Command, tmp_path: Path) -> None:
    run = used.tabled()
    model = run.make_model().eval()
    save_file(model.state_dict(), tmp_path / "tables.safetensors")
    words = ("--from", tmp_path / "tables.safetensors", "--plan", "data=2", "--json")
    said = command("evaluate", f"{USED}:tabled", *words)
    assert said.code == 0, said.errors
    with torch.no_grad():
        wanted = run.loss(model(run.data.inputs), run.data.target)
    assert said.answer["loss"] == pytest.approx(float(wanted))


@pytest.mark.full
def test_a_lost_rank_is_replaced_in_an_evaluation(
    command: Command, classified: Finished, tmp_path: Path
) -> None:
    words = ("--from", classified.run_dir, "--set", f"file={tmp_path / 'died'}")
    said = command("evaluate", f"{USED}:dying", *words, "--plan", "data=2", "--json")
    assert (tmp_path / "died").exists()
    assert said.code == 0, said.errors
    assert {"loss": said.answer["loss"], **said.answer["metrics"]} == classified.evaluation


@pytest.mark.full
def test_an_interrupt_ends_an_evaluation_at_once(
    pool: Pool, classified: Finished, tmp_path: Path
) -> None:
    words = ["evaluate", CLASSIFIER, "--from", str(classified.run_dir), "--set", "pause=3"]
    words += ["--plan", "data=2", "--run-dir", str(tmp_path / "run")]
    out, errors = tmp_path / "out", tmp_path / "err"
    started = pool.start(
        run_in, "", words, environment={}, output=out, errors=errors, directory=tmp_path
    )
    formed = wait_until(lambda: bool(faults.events(tmp_path / "run", "formed")), LIMIT_S)
    assert formed, errors.read_text()
    started.send_signal(signal.SIGINT)
    assert started.wait(LIMIT_S) == 130
    assert "stopped by SIGINT" in errors.read_text() and not out.read_text()


@pytest.mark.full
def test_an_evaluation_from_python(classified: Finished) -> None:
    """In a process that cannot fork: pytest's has threads."""
    found = shoal.evaluate(used.classifier, from_=classified.run_dir, plan="data=2", progress=False)
    assert {"loss": found.loss, **found.metrics} == classified.evaluation
    with pytest.raises(UsageError, match=r"another shape: 0\.bias, 0\.weight"):
        shoal.evaluate(used.classifier, classified.run_dir, settings={"width": 4})


# ---- predict


def outputs(run_dir: Path) -> torch.Tensor:
    model = shoal.load(run_dir, used.classifier)
    with torch.no_grad():
        inputs = [used.classifier().evaluate[i][0] for i in range(101)]
        return torch.cat([model(torch.stack(inputs[at : at + 12])) for at in range(0, 101, 12)])


@pytest.mark.parametrize("suffix", [".jsonl", ".npz", ".safetensors"])
def test_predictions_are_the_models_answers_in_order(
    classified: Finished, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"answers{suffix}"
    words = ["predict", CLASSIFIER, "--from", str(classified.run_dir), "--out", str(out), "--json"]
    assert run_here(words) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer == {"samples": 101, "out": str(out), "exit_code": 0}
    wanted = outputs(classified.run_dir)
    if suffix == ".jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        found, samples = torch.tensor([row["output"] for row in rows]), [r["sample"] for r in rows]
    elif suffix == ".npz":
        loaded = np.load(out)
        found, samples = torch.from_numpy(loaded["output"]), loaded["sample"].tolist()
    else:
        tensors = load_file(out)
        found, samples = tensors["output"], tensors["sample"].tolist()
    assert torch.equal(found, wanted) and samples == list(range(101))
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name]


# ---- generate


def test_a_language_model_writes(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(*words: str) -> dict:
        given = ["generate", CHARACTERS, "--from", str(written), "--prompt", "she sells sea shells"]
        assert run_here([*given, "--tokens", "30", *words, "--json"]) == 0
        answer: dict = json.loads(capsys.readouterr().out.splitlines()[-1])
        return answer

    first, again, other = write("--seed", "1"), write("--seed", "1"), write("--seed", "2")
    assert first == again and first["text"] != other["text"]
    assert first["text"] == "she sells sea shells" + first["completion"]
    assert first["tokens"] == len(first["completion"]) == 30
    greedy = write("--temperature", "0", "--seed", "1")
    assert greedy["text"] == write("--temperature", "0", "--seed", "2")["text"]
    assert greedy["text"] == write("--temperature", "5", "--top-k", "1")["text"]
    assert greedy["text"] == write("--temperature", "5", "--top-p", "0.0001")["text"]


def make_directory(path: Path) -> None:
    """As save_pretrained leaves it: a tiny Llama, and a tokenizer of words that are characters."""
    import tokenizers
    import transformers

    run = used.llama()
    run.make_model().save_pretrained(path)
    words = {character: place for place, character in enumerate(run.tokenizer.alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="."))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(path)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("wrapped", [0, 1])
def test_from_a_directory_of_hugging_face_to_another(
    command: Command, tmp_path: Path, wrapped: int
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()  # whose thread stays
    make_directory(tmp_path / "first")
    settings = ("--set", f"wrapped={wrapped}", "--set", "has_tokenizer=0")
    recipe, run_dir, last = f"{USED}:llama", tmp_path / "run", tmp_path / "last"
    words = ("--from", tmp_path / "first", "--run-dir", run_dir, "--plan", "data=2")
    trained = command("train", recipe, *settings, *words)
    assert trained.code == 0, trained.errors
    assert ("'inner.' was put before its names" in trained.errors) == bool(wrapped)
    exported = command(
        *("checkpoint", "export", run_dir, last, "--to", "huggingface", "--like", recipe, *settings)
    )
    assert exported.code == 0, exported.errors
    texts = []
    for source in (run_dir, last, run_dir / "model.safetensors"):
        words = ("--from", source, "--prompt", "she sells", "--tokens", "9", "--temperature", "0")
        said = command("generate", recipe, *settings, *words, "--json")
        assert said.code == 0, said.errors
        texts.append(said.answer["text"])
    model = transformers.AutoModelForCausalLM.from_pretrained(last)
    tokenizer = transformers.AutoTokenizer.from_pretrained(last)
    given = tokenizer("she sells", return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**given, max_new_tokens=9, do_sample=False)
    texts.append(tokenizer.decode(written[0], skip_special_tokens=True))
    assert len(set(texts)) == 1 and len(texts[0]) == len("she sells") + 9, texts


# ---- what is refused


def weights_of_another_model(folder: Path) -> Path:
    save_file({"layer.weight": torch.ones(2, 2)}, folder / "other.safetensors")
    return folder / "other.safetensors"


REFUSED = {
    "no weights": ("--from {run}/none --out a.npz", "none"),
    "another model": ("--from {other} --out a.npz", "0.weight"),
    "another size": ("--from {run} --out a.npz --set width=4", "of another shape: 0.bias, 0.w"),
    "an unknown format": ("--from {run} --out a.docx", "Known: .jsonl, .npz"),
    "no suffix": ("--from {run} --out a", "Known: .jsonl, .npz"),
    "a file that is there": ("--from {run} --out {other}", "is there already"),
    "nothing to evaluate": ("--from {run} --out a.npz --set has_evaluate=0", "--on-data train"),
    "a URL": ("--from {run} --out s3://bucket/a.npz", "written to a disk"),
    "a directory that is a file": ("--from {run} --out {other}/a.npz", "Nothing was left there"),
    "no samples at a time": ("--from {run} --out a.npz --batch-size 0", "batch-size"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_prediction_that_is_refused(
    classified: Finished,
    tmp_path: Path,
    what: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    other, (words, told) = weights_of_another_model(tmp_path), REFUSED[what]
    given = words.format(run=classified.run_dir, other=other).split()
    assert run_here(["predict", CLASSIFIER, *given]) == 2
    said = capsys.readouterr()
    assert told in said.err and "Traceback" not in said.err and not said.out
    assert [path.name for path in tmp_path.iterdir()] == [other.name]


WRITES = {
    "an empty prompt": (CHARACTERS, ["--prompt", ""], "The prompt is empty"),
    "an unknown character": (CHARACTERS, ["--prompt", "she é"], "'é'"),
    "no tokens": (CHARACTERS, ["--prompt", "she", "--tokens", "0"], "tokens"),
    "below zero": (CHARACTERS, ["--prompt", "she", "--temperature", "-1"], "temperature"),
    "no number": (CHARACTERS, ["--prompt", "she", "--temperature", "nan"], "temperature"),
    "no tokenizer": (f"{USED}:without_tokenizer", ["--prompt", "she"], "tokenizer="),
    "a classifier": (f"{USED}:no_language_model", ["--prompt", "abc"], "does not match|not of the"),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_text_that_is_refused(
    written: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, words, told = WRITES[what]
    assert run_here(["generate", recipe, "--from", str(written), *words]) == 2
    said = capsys.readouterr()
    assert any(one in said.err for one in told.split("|")), said.err
    assert "Traceback" not in said.err and not said.out


def test_a_model_that_writes_no_text(
    classified: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--from", str(classified.run_dir), "--prompt", "abc"]
    assert run_here(["generate", f"{USED}:no_language_model", *words]) == 2
    assert "needs a causal language model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--from {run} --set width=4", "of another shape: 0.bias, 0.weight"),
        pytest.param("--from {run}/none", "none", marks=pytest.mark.full),
        pytest.param(
            "--from {run} --set has_evaluate=0", "--on-data train", marks=pytest.mark.full
        ),
        pytest.param("--from {run} --plan data=5", "batch", marks=pytest.mark.full),
    ],
)
def test_an_evaluation_that_is_refused(
    command: Command, classified: Finished, tmp_path: Path, words: str, told: str
) -> None:
    said = command("evaluate", CLASSIFIER, *words.format(run=classified.run_dir).split())
    assert said.code == 2 and told in said.errors and not said.out, said
    assert "Traceback" not in said.errors
    assert not list((tmp_path / "work").iterdir())


def test_a_damaged_checkpoint_is_refused(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "step"
    shutil.copytree(written / "checkpoints/step-00000020", copy)
    file = max(copy.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(file.read_bytes())
    for place in range(len(content) // 8, len(content), 64):
        content[place] ^= 1
    file.write_bytes(content)
    assert run_here(["generate", CHARACTERS, "--from", str(copy), "--prompt", "she"]) == 2
    assert "damaged" in (said := capsys.readouterr().err) or "hash" in said, said
