"""Letters come once and in order, whatever the line loses."""

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.host_channel import BEAT_S, RESEND_S, HostChannel, Packet


@given(seed=st.integers(0, 2**32 - 1), loss=st.floats(0, 0.7), num=st.integers(0, 30))
def test_what_is_lost_comes_again(seed: int, loss: float, num: int) -> None:
    """Each side writes at random; the line loses packets, and doubles some."""
    draws, now = random.Random(seed), 0.0
    sides, came = (HostChannel(now), HostChannel(now)), ([], [])  # type: tuple[Post, Post], tuple[list[bytes], list[bytes]]
    left = [num, num]

    def carry(packet: Packet, to: int, loses: float) -> None:
        for _ in range(1 + (draws.random() < 0.2)):
            if draws.random() >= loses:
                content = sides[to].receive(packet, now)
                if content is not None:
                    came[to].append(content)

    for turn in range(2000):
        now += 0.1
        loses = loss if turn < 1000 else 0.0
        for side in (0, 1):
            if left[side] and draws.random() < 0.3:
                left[side] -= 1
                carry(sides[side].wrap(str(num - left[side]).encode(), now), 1 - side, loses)
            for packet in sides[side].due(now):
                carry(packet, 1 - side, loses)
    for side in (0, 1):
        assert came[side] == [str(i + 1).encode() for i in range(num)]
        assert sides[side].is_acknowledged


def test_silence_is_told_and_signs_of_life_end_it() -> None:
    one, other = HostChannel(0.0), HostChannel(0.0)
    assert one.due(BEAT_S / 2) == []
    (sign,) = one.due(2 * BEAT_S)
    assert sign == Packet(0, 0) and other.silent_s(2 * BEAT_S) == 2 * BEAT_S
    assert other.receive(sign, 2 * BEAT_S) is None
    assert other.silent_s(2 * BEAT_S) == 0


def test_a_letter_is_not_sent_again_before_its_time() -> None:
    one = HostChannel(0.0)
    packet = one.wrap(b"a", 1.0)
    assert [found.number for found in one.due(1.0 + RESEND_S / 2)] == [0]
    assert one.due(1.0 + 1.1 * RESEND_S) == [packet]
    assert not one.is_acknowledged
    one.receive(Packet(0, 1), 3.0)
    assert one.is_acknowledged
