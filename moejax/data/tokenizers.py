"""Text to token numbers and back."""

import hashlib
import pathlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from moejax.config.errors import ConfigError


class Tokenizer(Protocol):
    """What the data and the sampled continuation need of a tokenizer."""

    vocab_size: int
    """One more than the largest token number; the model's vocab_size must be at least this."""
    identity: str
    """Equal for tokenizers that are the same, wherever their files lie."""

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, int32 [T]; no token is added at its start or end."""
        ...

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of tokens."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8."""

    vocab_size = 256
    identity = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Bytes of the text, int32 [T]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of the bytes; a sample may end inside a character, so what is not UTF-8 becomes U+FFFD."""
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json of the `tokenizers` library."""

    def __init__(self, path: str):
        import tokenizers  # not needed for bytes

        if not pathlib.Path(path).is_file():
            raise ConfigError(f"data.tokenizer={path!r} is neither 'bytes' nor a file; give the path of a tokenizer.json.")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"data.tokenizer={path!r} is not a tokenizer.json that the tokenizers library reads: {error}") from error
        self._tokenizer.no_truncation()  # a file may carry the settings of its last use
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.identity = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:16]

    def encode(self, text: str) -> np.ndarray:
        """Tokens of the text, int32 [T], without special tokens."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of the tokens, special ones included."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Args:
      name: "bytes", or the path of a tokenizer.json.

    Raises:
      ConfigError: the file is missing or not a tokenizer; the message names it.
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)
