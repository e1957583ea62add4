"""The directory of a study: what it is of, its journal, and the run directories of its trials.

    study.json         what the study is of: recipe, settings, space, metric, plan
    study.log          the journal of Optuna, unless the storage is a database
    trials/0007/       the run directory of trial 7, as `shoal train` writes it
    trials/0007.json   how its run ended
    trials/0007.log    what its process printed
    result.json        what `--json` prints
    study.svg          the plot at the end

It belongs to one driver at a time, by the same lock as a run directory. The same command finds it
again, as long as the study has fewer trials than it asks for.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from shoal.errors import UsageError
from shoal.storage.decoding import decode_json, encode_json, try_decode_json
from shoal.storage.files import read_regular_file, write_atomic
from shoal.storage.run_dir import OWNER, RUN, lock_directory, stem_of

STUDY, RESULT, JOURNAL, TRIALS = "study.json", "result.json", "study.log", "trials"
PLOT, LOG = "study.svg", "recipe.log"
_MOST_BYTES = 1 << 20
_HEAVY = ("checkpoints", "model.safetensors")  # of a trial that is not to be used again


class StudyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two studies the same one. How it is searched may change from day to day."""

    recipe: str
    settings: dict[str, str]
    space: str
    metric: str  # with its direction
    plan: str | None
    storage: str | None = None  # without a password

    def differences(self, other: "StudyRecord") -> list[str]:
        """What another one has else, in words."""
        return [
            f"{name} {_shown(getattr(other, name))}, not {_shown(getattr(self, name))}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


class _Result(msgspec.Struct, frozen=True):
    """What is read of a study's result."""

    finished: int = 0


class StudyDir:
    """The files of one study, in a directory that is locked."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    @property
    def name(self) -> str:
        """The name of the study in its storage."""
        return self.path.resolve().name

    def run_dir(self, number: int) -> Path:
        return self.path / TRIALS / f"{number:04d}"

    def log_of(self, number: int) -> Path:
        return self.path / TRIALS / f"{number:04d}.log"

    def begin(self, record: StudyRecord) -> None:
        """Write down what the study is of; it has begun."""
        (self.path / TRIALS).mkdir(exist_ok=True)
        text = msgspec.json.format(encode_json(record), indent=2)
        write_atomic(self.path / STUDY, text + b"\n")

    def drop_weights(self, number: int) -> None:
        """Remove the checkpoints and the model of a trial; its record stays."""
        for name in _HEAVY:
            path = self.run_dir(number) / name
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                path.unlink(missing_ok=True)


def find_study(path: Path | None, record: StudyRecord, num_trials: int | None) -> Path:
    """The directory of the study: the one that is named, the last one if it can go on, or new."""
    if path is not None:
        return path
    numbered = _numbered(record.recipe)
    last = max(numbered, default=0)
    if last and not record.differences(numbered[last][1]):
        ended = num_trials is None or _num_ended(numbered[last][0]) >= num_trials
        if not ended:
            return numbered[last][0]
    number = last + 1
    while (found := Path("runs") / f"{stem_of(record.recipe)}-tune-{number}").exists():
        number += 1
    return found


@contextmanager
def open_study(path: Path, record: StudyRecord) -> Iterator[StudyDir]:
    """The study's directory, locked. What was made for a study that did not begin is removed."""
    _refuse_other(path, record)
    with lock_directory(path):
        try:
            yield StudyDir(path)
        finally:
            if not (path / STUDY).exists():
                for entry in filter(lambda entry: _is_ours(entry.name), path.iterdir()):
                    if entry.name != OWNER:
                        entry.unlink()


def _refuse_other(path: Path, record: StudyRecord) -> None:
    if (path / RUN).exists():
        raise UsageError(f"{path} holds a run, and no study. Choose another --run-dir DIR.")
    if not (path / STUDY).exists():
        if path.is_dir() and any(not _is_ours(entry.name) for entry in path.iterdir()):
            raise UsageError(f"{path} holds other files, and no study. Choose another directory.")
        return
    try:
        content = read_regular_file(path / STUDY, _MOST_BYTES)
    except OSError as error:
        raise UsageError(f"{path / STUDY} cannot be read: {error.strerror}.") from error
    known = decode_json(
        content, StudyRecord, str(path / STUDY), way_out="Choose another --run-dir DIR."
    )
    if wrong := known.differences(record):
        raise UsageError(
            f"{path} holds another study: this command has {'; '.join(wrong)}. A study goes on as "
            "it began; choose another --run-dir DIR for this one."
        )


def _is_ours(name: str) -> bool:
    """Whether a file may be there before its study has begun."""
    return name in (OWNER, LOG) or name.startswith(JOURNAL)


def _numbered(recipe: str) -> dict[int, tuple[Path, StudyRecord]]:
    """The studies of a recipe below runs/, by their numbers."""
    found = {}
    for file in Path("runs").glob(f"{stem_of(recipe)}-tune-*/{STUDY}"):
        number = file.parent.name.rpartition("-")[2]
        with suppress(OSError):
            record = try_decode_json(read_regular_file(file, _MOST_BYTES), StudyRecord)
            if number.isdigit() and record is not None:
                found[int(number)] = (file.parent, record)
    return found


def _num_ended(path: Path) -> int:
    """How many trials a study had finished when its driver last ended."""
    with suppress(OSError):
        found = try_decode_json(read_regular_file(path / RESULT), _Result)
        return 0 if found is None else found.finished
    return 0


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={text}" for name, text in value.items()) or "no settings"
    return "none" if value is None else str(value)
