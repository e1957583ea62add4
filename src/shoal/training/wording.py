"""Messages for the way that a run was asked for: options of the command as arguments of Python.

Messages name options as `shoal train` and `shoal tune` have them. Who calls `shoal.train` reads
`run_dir=DIR` where a shell reads `--run-dir DIR`.
"""

import re

# Options whose argument has another name than theirs.
_NAMES = {
    "from": "begin_from",
    "set": "settings",
    "form-timeout": "form_timeout_s",
    "heartbeat-timeout": "heartbeat_timeout_s",
    "stop-timeout": "stop_timeout_s",
    "join-timeout": "join_timeout_s",
    **{name: name for name in ("plan", "ranks", "checkpoints", "keep", "take", "replay")},
    **{name: name for name in ("spares", "listen", "on", "track", "trace")},
    **{name: name for name in ("space", "trials", "metric", "sampler", "pruner", "parallel")},
    "storage": "storage",
    "new-data": "new_data",
    "run-dir": "run_dir",
}
_FLAGS = ("resume", "partial", "tensorboard")
_SETTING = re.compile(r"--set (\w+)(?:=([^\s:,)]+))?")
_VALUE = re.compile(rf"--({'|'.join(_NAMES)}) (?=[A-Z]{{2,}}|(?<=--run-dir )\S|(?<=--on )\S)")
_OPTION = re.compile(rf"--({'|'.join([*_NAMES, *_FLAGS])})\b(?!-)")


def in_python(message: str) -> str:
    """A message with the words of `shoal.train`. Pure."""
    message = message.replace("the same command", "the same call")
    message = message.replace("--resume --run-dir", "--resume, --run-dir")
    message = _SETTING.sub(lambda m: f'settings={{"{m[1]}": {m[2] or "..."}}}', message)
    message = _VALUE.sub(lambda m: f"{_NAMES[m[1]]}=", message)
    return _OPTION.sub(lambda m: _NAMES.get(m[1]) or f"{m[1]}=True", message)
