"""Requests to a server that may be away for a moment: repeated, with a bound.

A request that fails for a reason that may pass is repeated after a growing pause, a bounded number
of times, each with a timeout of its own. So a run whose server is gone ends with `SourceLost`,
which names it, after a time that is known beforehand, and never hangs.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from shoal.data.readers.records import SourceLost
from shoal.errors import ShoalError
from shoal.storage.object_client import RetryPolicy

Answer = TypeVar("Answer")


class PermanentFailure(SourceLost):
    """What failed will not pass by itself; before a run it is the user's to correct."""


def ask_with_retries(
    act: Callable[[], Answer],
    may_pass: Callable[[Exception], bool],
    patience: RetryPolicy,
    what: str,
    way_out: str,
) -> Answer:
    """What `act` returns, at last; `what` names the server and the question.

    `way_out` is the advice for what will not pass by itself.
    """
    for failures in range(1, patience.num_tries + 1):
        try:
            return act()
        except ShoalError:
            raise
        except Exception as error:
            said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            if not may_pass(error):
                raise PermanentFailure(f"{what}: {said}. {way_out}") from error
            if failures == patience.num_tries:
                raise SourceLost(
                    f"{what}: {said}. It was tried {failures} times. Check that the server runs "
                    "and can be reached, and that no other process holds a lock on what is asked "
                    "for; then start again."
                ) from error
        time.sleep(patience.pause_s(failures))
    raise AssertionError("at least one try")
