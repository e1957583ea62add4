"""The position of a stream in a run's state: what checkpoints keep and newcomers are given.

All ranks read the same samples, so one text for all of them says where the next step begins, in the
stream's own words (`data/streams.py`). Without it, or if the stream cannot say it, a rank reads the
stream from its beginning; the step alone says which samples it needs.
"""

from typing import TYPE_CHECKING

from shoal.data.sources import stream_of
from shoal.sync.state import ShardedState, StateSource

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

_NAME = "stream"


def with_stream_position(trainer: "Trainer", state: ShardedState) -> ShardedState:
    """A state to save or to hand over, with the place at which the next step begins."""
    stream = stream_of(trainer.batches.source)
    text = "" if stream is None else stream.bookmark(trainer.batches.at(trainer.step).ids)
    return state._replace(plain=state.plain | {_NAME: text}) if text else state


def take_stream_position(trainer: "Trainer", source: StateSource) -> None:
    stream = stream_of(trainer.batches.source)
    if stream is not None and _NAME in source.plain:
        stream.go_to(source.plain[_NAME])
