"""Bytes and tokenizer files."""

import numpy as np
import pytest
import tokenizers

from moejax.config.errors import ConfigError
from moejax.data.tokenizers import load_tokenizer


def test_bytes_round_trip():
    tokenizer = load_tokenizer("bytes")
    text = "def f():\n\treturn '漢字 🙂'\n"
    tokens_T = tokenizer.encode(text)
    assert tokenizer.vocab_size == 256 and tokens_T.dtype == np.int32
    np.testing.assert_array_equal(tokens_T, list(text.encode()))
    assert tokenizer.decode(tokens_T) == text
    assert tokenizer.decode(tokens_T[:-3]).endswith("�") and tokenizer.decode([]) == "" and tokenizer.encode("").shape == (0,)


def word_tokenizer(path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 5}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", tokenizer.token_to_id("<end>"))]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return tokenizer


def test_a_tokenizer_file_is_read_without_special_tokens_truncation_or_padding(tmp_path):
    original = word_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    np.testing.assert_array_equal(tokenizer.encode("a b c a b"), [1, 5, 0, 1, 5])
    assert tokenizer.encode("").dtype == np.int32
    assert tokenizer.decode(np.array([1, 5])) == "a b"
    assert tokenizer.vocab_size == max(original.get_vocab().values()) + 1 == 6  # ids have holes: the count of 4 would be too small
    (tmp_path / "copy.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    assert load_tokenizer(str(tmp_path / "copy.json")).identity == tokenizer.identity != load_tokenizer("bytes").identity


def test_errors_name_the_path(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"missing\.json' is neither 'bytes' nor a file"):
        load_tokenizer(str(tmp_path / "missing.json"))
    with pytest.raises(ConfigError, match=r"broken\.json' is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "broken.json"))
