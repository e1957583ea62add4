"""A tokenizer of single characters: a token is a character's place in an alphabet."""

from collections.abc import Iterable

from shoal.errors import UsageError

_SHOWN = 100  # characters of an alphabet in an error


class Characters:
    """For a Run's `tokenizer`, of a model that reads and writes characters."""

    def __init__(self, alphabet: str):
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise UsageError("An alphabet has at least one character, and each of them once.")
        self.alphabet = alphabet
        self._place_of = {character: place for place, character in enumerate(alphabet)}

    def encode(self, text: str) -> list[int]:
        unknown = [one for one in dict.fromkeys(text) if one not in self._place_of]
        if unknown:
            shown = "".join(sorted(self.alphabet))[:_SHOWN]
            raise UsageError(
                f"The text has {', '.join(map(repr, unknown[:5]))}, and the model knows only the "
                f"{len(self.alphabet)} characters that it was trained on: {shown!r}. Write it "
                "without."
            )
        return [self._place_of[character] for character in text]

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.alphabet[token] for token in tokens)
