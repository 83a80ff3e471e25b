"""One stream of global batches, whatever the number of processes, and wherever it was left."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
import tokenizers

from moejax.config.data import DataConfig, SourceConfig
from moejax.config.errors import ConfigError
from moejax.data.batch import Batch
from moejax.data.loader import Loader, StateMismatchError
from moejax.data.mixture import epoch_length, is_heldout, open_splits, token_stream
from moejax.data.sources import DataError
from moejax.data.tokenizers import load_tokenizer


@pytest.fixture
def config(tmp_path):
    """Two sources of 30 documents, told apart by their letters, of 1 to 90 bytes."""
    lengths = np.random.default_rng(0).integers(1, 90, 60)
    for number, length in enumerate(lengths[:30]):
        (tmp_path / f"{number}.txt").write_text("a" * int(length - 1) + chr(48 + number))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": "b" * int(length)}) + "\n" for length in lengths[30:]))
    return DataConfig(
        sources=(
            SourceConfig(kind="text", path=str(tmp_path / "*.txt"), weight=3.0),
            SourceConfig(kind="jsonl", path=str(tmp_path / "b.jsonl"), weight=1.0),
        ),
        seq_len=32,
        batch_size=8,
        pack_rows=3,
        heldout_percent=30,
    )


def take(loader, num):
    return list(itertools.islice(loader, num))


def assert_same(ours: list[Batch], theirs: list[Batch]):
    assert len(ours) == len(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def global_batches(config, num_batches, process_count, state=None):
    """Batches put together from the rows of all processes, and the state after them."""
    parts, states = [], []
    for process_index in range(process_count):
        loader = Loader(config, split="train", process_index=process_index, process_count=process_count)
        if state is not None:
            loader.restore(state)
        parts.append(take(loader, num_batches))
        states.append(loader.state())
        loader.close()
    assert all(state == states[0] for state in states)
    batches = [jax.tree.map(lambda *rows: np.concatenate(rows), *rows_of_all) for rows_of_all in zip(*parts, strict=True)]
    return batches, json.loads(json.dumps(states[0]))


def test_the_same_config_gives_the_same_batches_and_another_seed_others(config):
    first, second = Loader(config, split="train"), Loader(config, split="train")
    other = Loader(dataclasses.replace(config, shuffle_seed=1), split="train")
    ours, same, others = take(first, 4), take(second, 4), take(other, 4)
    assert_same(ours, same)
    assert any((a.tokens_BL != b.tokens_BL).any() for a, b in zip(ours, others, strict=True))
    for loader in (first, second, other):
        loader.close()
    for batch in ours:
        batch.segments.verify()


def test_global_batches_do_not_depend_on_the_number_of_processes_also_across_resumes(config):
    whole, end = global_batches(config, 9, 1)
    one, state = global_batches(config, 3, 1)
    two, state = global_batches(config, 3, 2, state)
    four, state = global_batches(config, 3, 4, state)
    assert_same(whole, one + two + four)
    assert state == end


def test_the_state_belongs_to_the_batch_handed_out_not_to_those_prefetched(config):
    loader = Loader(config, split="train")
    batches, states = [], [loader.state()]
    for _ in range(6):
        batches.append(next(loader))
        states.append(json.loads(json.dumps(loader.state())))
    for at in (4, 0, 5, 2):  # forwards and backwards, on the very same loader, its thread running
        loader.restore(states[at])
        assert_same(take(loader, 1), batches[at : at + 1])
    loader.close()


def test_the_state_is_small(config):
    loader = Loader(config, split="train")
    take(loader, 5)
    assert len(json.dumps(loader.state())) < 2000
    loader.close()


def test_a_state_of_another_stream_is_refused_by_name(config):
    loader = Loader(config, split="train")
    state = loader.state()
    for change, message in (
        ({"seq_len": 16}, "seq_len: saved 32, now 16"),
        ({"shuffle_seed": 3}, "shuffle_seed: saved 0, now 3"),
        ({"sources": config.sources[:1]}, "sources: saved"),
    ):
        other = Loader(dataclasses.replace(config, **change), split="train")
        with pytest.raises(StateMismatchError, match=message):
            other.restore(state)
    with pytest.raises(StateMismatchError, match="split: saved 'train', now 'heldout'"):
        Loader(config, split="heldout").restore(state)


def test_heldout_batches_are_the_same_each_time_and_hold_each_document_at_most_once(config):
    first = take(Loader(config, split="heldout"), 100)
    again = take(Loader(dataclasses.replace(config, shuffle_seed=9), split="heldout"), 100)
    assert_same(first, again)
    assert {batch.tokens_BL.shape for batch in first} == {(8, 32)}
    (texts, _) = open_splits(config)["heldout"]
    ends = [texts[index].text[-1] for index in range(len(texts))]
    seen = bytes(np.concatenate([batch.tokens_BL.ravel() for batch in first]).astype(np.uint8)).decode()
    assert all(seen.count(end) <= 1 for end in ends) and sum(seen.count(end) for end in ends) > 2


def test_the_heldout_data_of_one_source_is_read_whole_and_once(config):
    config = dataclasses.replace(config, sources=config.sources[:1])
    (documents,) = open_splits(config)["heldout"]
    loader = Loader(config, split="heldout")
    batches = list(loader)
    num_tokens = sum((batch.segments.ids_BL >= 0).sum() for batch in batches)
    assert num_tokens == sum(len(documents[index].text) for index in range(len(documents)))
    assert (batches[-1].segments.ids_BL[-1] == -1).all() and not batches[-1].weights_BL[-1].any()  # filled up with padding
    with pytest.raises(StopIteration):
        next(loader)


def test_training_reads_no_heldout_document(config):
    (train, _), (heldout, _) = open_splits(config).values()
    loader = Loader(config, split="train")
    seen = set(np.concatenate([batch.tokens_BL.ravel() for batch in take(loader, 40)]).tolist())
    loader.close()
    ends = [{ord(split[index].text[-1]) for index in range(len(split))} for split in (train, heldout)]
    assert ends[0] <= seen and not ends[1] & seen


def test_documents_come_in_the_shares_of_their_weights_and_in_a_new_order_each_epoch(config):
    splits = open_splits(config)["train"]
    stream = token_stream(config, splits, "train", load_tokenizer("bytes"))
    texts = [bytes(stream[index].astype(np.uint8)).decode() for index in range(400)]
    assert abs(sum("b" not in text for text in texts) - 300) <= 2
    ends = [text[-1] for text in texts if "b" not in text]
    size = len(splits[0])
    epochs = [ends[at : at + size] for at in range(0, 4 * size, size)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_errors_of_the_thread_reach_the_consumer_and_stay(config, tmp_path):
    (tmp_path / "7.txt").write_bytes(b"\xff")
    (tmp_path / "8.txt").write_bytes(b"\xff")
    loader = Loader(config, split="train")
    for _ in range(2):
        with pytest.raises(DataError, match=r"[78]\.txt: not UTF-8"):
            take(loader, 100)
    loader.close()


def test_a_closed_loader_hands_out_nothing(config):
    loader = Loader(config, split="train")
    next(loader)
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_processes_must_divide_the_batch(config):
    with pytest.raises(ConfigError, match="batch_size=8 must be a multiple of the 3 processes"):
        Loader(config, split="train", process_count=3)
    with pytest.raises(ValueError, match="process_index=2"):
        Loader(config, split="train", process_index=2, process_count=2)


def test_a_tokenizer_file_feeds_the_loader(config, tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "b": 1, "a": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loader = Loader(dataclasses.replace(config, tokenizer=str(tmp_path / "tokenizer.json")), split="train")
    batch = next(loader)
    loader.close()
    assert loader.tokenizer.vocab_size == 3 and {1, 2} <= set(batch.tokens_BL.ravel().tolist()) <= {0, 1, 2}


def test_text_that_cannot_be_encoded_is_an_error_with_the_document_s_name(tmp_path):
    lines = ['{"text": "ab"}\n'] * 20 + ['{"text": "\\ud800"}\n'] * 20
    (tmp_path / "x.jsonl").write_text("".join(lines))
    config = DataConfig(sources=(SourceConfig(kind="jsonl", path=str(tmp_path / "x.jsonl")),), seq_len=4, heldout_percent=30)
    loader = Loader(config, split="train")
    with pytest.raises(DataError, match=r"x\.jsonl, line (2[1-9]|3\d|40): field 'text' is no text"):
        next(loader)
    loader.close()


def text_files(folder, texts):
    """A config of one text file per entry, of which three in ten are held out."""
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return DataConfig(sources=(SourceConfig(kind="text", path=str(folder / "*.txt")),), seq_len=8, batch_size=2, heldout_percent=30)


@pytest.mark.parametrize("text, longest", [("", 0), ("x", 1)])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_source_without_a_single_target_in_a_split_is_refused_when_it_is_opened(tmp_path, split, text, longest):
    of = lambda number: "heldout" if is_heldout(f"{number}.txt", 30) else "train"
    config = text_files(tmp_path, [text if of(number) == split else "two" for number in range(40)])
    count = sum(of(number) == split for number in range(40))
    match = rf"data\.sources\[0\] .*\*\.txt.*none of its {count} {split} documents has two tokens \(the longest has {longest}\)"
    for opened in ("train", "heldout"):  # a run without a held-out target ends before its first step
        with pytest.raises(DataError, match=match):
            Loader(config, split=opened)


def test_files_that_lose_their_text_while_they_are_read_end_the_stream_after_an_epoch(tmp_path):
    loader = Loader(text_files(tmp_path, ["two"] * 40), split="train")
    for path in tmp_path.glob("*.txt"):
        path.write_text("")
    with pytest.raises(DataError, match=r"an epoch of data\.sources, have no token"):
        take(loader, 100)
    loader.close()


def test_an_epoch_of_a_mixture_reads_every_document(config):
    splits = open_splits(config)["train"]
    stream = token_stream(config, splits, "train", load_tokenizer("bytes"))
    seen = {bytes(stream[index].astype(np.uint8)) for index in range(epoch_length(config, splits))}
    assert seen == {documents[index].text.encode() for documents in splits for index in range(len(documents))}


def test_a_document_that_shrank_since_the_state_was_saved_is_refused(tmp_path):
    config = text_files(tmp_path, ["a long text of many pieces " * 4] * 40)
    loader = Loader(config, split="train")
    next(loader)
    state = loader.state()
    loader.close()
    for path in tmp_path.glob("*.txt"):
        path.write_text("short")
    fresh = Loader(config, split="train")
    with pytest.raises(StateMismatchError, match="its file has changed"):
        fresh.restore(state)
        next(fresh)
    fresh.close()
