"""Every strategy keeps the interface's promises."""

import pytest

from shoal.numerics.codecs import make_codec
from shoal.numerics.fragments import FragmentSchedule
from shoal.sync.allreduce import AllReduce
from shoal.sync.gradient_packing import GradientPacking
from shoal.sync.local import LocalSGD
from shoal.sync.outer import OuterConfig
from shoal.sync.zero import ZeroSharded
from shoal.testing.conformance import NUM_STEPS, StrategyConformance


def exact(num_pieces: int) -> AllReduce:
    return AllReduce(num_pieces)


def host_shared(num_pieces: int) -> AllReduce:
    return AllReduce(num_pieces, apart="")


def host_shared_zero_2(num_pieces: int) -> AllReduce:
    return AllReduce(num_pieces, exact=False, apart="")


def ring(num_pieces: int) -> AllReduce:
    return AllReduce(num_pieces, exact=False)


def local(num_pieces: int) -> LocalSGD:
    return LocalSGD(num_pieces, FragmentSchedule(2, 1, NUM_STEPS), AllReduce)


def nesterov(num_pieces: int) -> LocalSGD:
    return LocalSGD(num_pieces, FragmentSchedule(2, 1, NUM_STEPS), AllReduce, OuterConfig(0.7, 0.9))


def streamed(num_pieces: int) -> LocalSGD:
    rule = OuterConfig(0.7, 0.9, make_codec("int8"))
    return LocalSGD(num_pieces, FragmentSchedule(4, 2, NUM_STEPS), AllReduce, rule=rule)


def streamed_for_long(num_pieces: int) -> LocalSGD:
    """In fragments the last step sends more than the one like it in any other window."""
    rule = OuterConfig(0.7, 0.9, make_codec("int8"))
    return LocalSGD(num_pieces, FragmentSchedule(4, 2, 2 * NUM_STEPS), AllReduce, rule=rule)


def zero_1(num_pieces: int) -> ZeroSharded:
    return ZeroSharded(num_pieces, scatter_each=False)


def zero_2(num_pieces: int) -> ZeroSharded:
    return ZeroSharded(num_pieces, scatter_each=True)


class TestAllReduce(StrategyConformance):
    @pytest.fixture
    def factory(self):
        return exact


class TestHostShared(StrategyConformance):
    holds_gradient = False

    @pytest.fixture
    def factory(self):
        return host_shared


class TestHostSharedZero1(TestHostShared):
    plan = "zero=1 precision=fp16"


class TestHostSharedZero2(TestHostShared):
    parity, plan = "close", "zero=2 precision=fp16"

    @pytest.fixture
    def factory(self):
        return host_shared_zero_2


class TestRing(StrategyConformance):
    parity, plan = "close", "sums=ring precision=fp16"

    @pytest.fixture
    def factory(self):
        return ring


class TestZero1(StrategyConformance):
    holds_all, plan = False, "zero=1 precision=fp16"

    @pytest.fixture
    def factory(self):
        return zero_1


class TestZero2(StrategyConformance):
    holds_all, plan = False, "zero=2 precision=fp16"
    parity = "close"  # with accumulation its sums are taken round by round

    @pytest.fixture
    def factory(self):
        return zero_2


class TestLocalSGD(StrategyConformance):
    parity, plan = "none", "local_steps=2"
    agrees_every_step = False

    @pytest.fixture
    def factory(self):
        return local


class TestOuter(TestLocalSGD):
    plan = "local_steps=2 outer=nesterov"

    @pytest.fixture
    def factory(self):
        return nesterov


class TestStreamed(TestLocalSGD):
    plan = "local_steps=4 outer=nesterov codec=int8 fragments=2"

    @pytest.fixture
    def factory(self):
        return streamed

    @pytest.fixture
    def long_factory(self):
        return streamed_for_long


def int8(num_pieces: int) -> AllReduce:
    return AllReduce(num_pieces, packing=GradientPacking("int8", NUM_STEPS))


def onebit(num_pieces: int) -> AllReduce:
    return AllReduce(num_pieces, packing=GradientPacking("onebit", NUM_STEPS))


def half(num_pieces: int) -> AllReduce:
    return AllReduce(num_pieces, packing=GradientPacking("bf16", NUM_STEPS))


def largest(num_pieces: int) -> ZeroSharded:
    packing = GradientPacking("topk:0.1+int8", NUM_STEPS)
    return ZeroSharded(num_pieces, scatter_each=False, packing=packing)


def int4_each_round(num_pieces: int) -> ZeroSharded:
    packing = GradientPacking("int4", NUM_STEPS)
    return ZeroSharded(num_pieces, scatter_each=True, packing=packing)


class TestInt8(StrategyConformance):
    parity, plan = "none", "codec=int8 precision=fp16"

    @pytest.fixture
    def factory(self):
        return int8


@pytest.mark.full
class TestOneBit(StrategyConformance):
    parity, plan = "none", "codec=onebit precision=fp16"

    @pytest.fixture
    def factory(self):
        return onebit


@pytest.mark.full
class TestHalf(StrategyConformance):
    parity, plan = "none", "codec=bf16 precision=fp16"

    @pytest.fixture
    def factory(self):
        return half


class TestLargest(StrategyConformance):
    parity, holds_all, plan = "none", False, "zero=1 codec=topk:0.1+int8 precision=fp16"

    @pytest.fixture
    def factory(self):
        return largest


@pytest.mark.full
class TestInt4EachRound(StrategyConformance):
    parity, holds_all, plan = "none", False, "zero=2 codec=int4 precision=fp16"

    @pytest.fixture
    def factory(self):
        return int4_each_round
