"""Messages name arguments of Python where the run was asked for from Python."""

import pytest

from shoal.training.wording import in_python


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("Choose another with --run-dir DIR.", "Choose another with run_dir=DIR."),
        (
            "go on with the same command and --resume --run-dir runs/a-1.",
            "go on with the same call and resume=True, run_dir=runs/a-1.",
        ),
        ("Go on with it by --resume, or", "Go on with it by resume=True, or"),
        ("--set lr=fast: 'fast' is not float", "settings={\"lr\": fast}: 'fast' is not float"),
        ("--set widht: no such", 'settings={"widht": ...}: no such'),
        ("take the weights alone (--from).", "take the weights alone (begin_from)."),
        ("no effect without --from SOURCE.", "no effect without begin_from=SOURCE."),
        ("--join-timeout gives them longer", "join_timeout_s gives them longer"),
        ("--listen has no effect", "listen has no effect"),
        ("--on slurn: there is none", "on=slurn: there is none"),
        ("--new-data RUN; --partial takes", "new_data=RUN; partial=True takes"),
        ("pip --no-deps --resume-later", "pip --no-deps --resume-later"),
    ],
)
def test_options_become_arguments(message: str, told: str) -> None:
    assert in_python(message) == told
