"""Amounts as people write them."""

from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.formatting import num_bytes_of, num_parameters


def test_amounts() -> None:
    amounts = [1, "1", "1B", "1GB", "1.5 GB", "512MB", "2GiB", "3kB", "3KB", " 1TB ", "5g", "1Ki"]
    expected = [1, 1, 1, 10**9, 15 * 10**8, 512 * 10**6, 2**31, 3000, 3000, 10**12, 5 * 10**9, 1024]
    assert [num_bytes_of(amount, "memory") for amount in amounts] == expected


def test_what_is_no_amount_is_refused() -> None:
    wrong: list[Any] = ["", "GB", "-1GB", "1 GBit", "1e9", "0", "1,5GB", "0GB", "0.4", "\u0661GB"]
    for amount in (*wrong, 0, -5, True, 1.5, None):
        with pytest.raises(UsageError, match=r"memory=.* is no amount\. Write"):
            num_bytes_of(amount, "memory")


def test_the_size_of_a_small_model_is_not_rounded_away() -> None:
    assert num_parameters(2_382) == "2,382 parameters"
    assert num_parameters(12_610_000) == "12.6 M parameters"
