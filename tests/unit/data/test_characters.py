"""Characters become tokens and come back; others are named."""

import pytest

import shoal
from shoal.errors import UsageError


def test_text_comes_back() -> None:
    tokenizer = shoal.data.Characters("abc \n")
    assert tokenizer.encode("cab\n") == [2, 0, 1, 4]
    assert tokenizer.decode(tokenizer.encode("a cab\n")) == "a cab\n"


def test_unknown_characters_are_named() -> None:
    with pytest.raises(UsageError, match=r"'x', 'é'.* 3 characters"):
        shoal.data.Characters("abc").encode("axé")
    for alphabet in ("", "aa"):
        with pytest.raises(UsageError, match="alphabet"):
            shoal.data.Characters(alphabet)
