"""Letters come once and in order, whatever the line loses."""

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.post import AGAIN_S, BEAT_S, Letter, Post


@given(seed=st.integers(0, 2**32 - 1), loss=st.floats(0, 0.7), num=st.integers(0, 30))
def test_what_is_lost_comes_again(seed: int, loss: float, num: int) -> None:
    """Each side writes at random; the line loses letters, and doubles some."""
    draws, now = random.Random(seed), 0.0
    sides, came = (Post(now), Post(now)), ([], [])  # type: tuple[Post, Post], tuple[list[bytes], list[bytes]]
    left = [num, num]

    def carry(letter: Letter, to: int, loses: float) -> None:
        for _ in range(1 + (draws.random() < 0.2)):
            if draws.random() >= loses:
                content = sides[to].read(letter, now)
                if content is not None:
                    came[to].append(content)

    for turn in range(2000):
        now += 0.1
        loses = loss if turn < 1000 else 0.0
        for side in (0, 1):
            if left[side] and draws.random() < 0.3:
                left[side] -= 1
                carry(sides[side].write(str(num - left[side]).encode(), now), 1 - side, loses)
            for letter in sides[side].due(now):
                carry(letter, 1 - side, loses)
    for side in (0, 1):
        assert came[side] == [str(i + 1).encode() for i in range(num)]
        assert sides[side].is_read


def test_silence_is_told_and_signs_of_life_end_it() -> None:
    one, other = Post(0.0), Post(0.0)
    assert one.due(BEAT_S / 2) == []
    (sign,) = one.due(2 * BEAT_S)
    assert sign == Letter(0, 0) and other.silent_s(2 * BEAT_S) == 2 * BEAT_S
    assert other.read(sign, 2 * BEAT_S) is None
    assert other.silent_s(2 * BEAT_S) == 0


def test_a_letter_is_not_sent_again_before_its_time() -> None:
    one = Post(0.0)
    letter = one.write(b"a", 1.0)
    assert [found.number for found in one.due(1.0 + AGAIN_S / 2)] == [0]
    assert one.due(1.0 + 1.1 * AGAIN_S) == [letter]
    assert not one.is_read
    one.read(Letter(0, 1), 3.0)
    assert one.is_read
