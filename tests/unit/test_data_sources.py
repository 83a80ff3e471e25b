"""Documents of every kind of source, their names, and errors that say what is there."""

import json
import pathlib
import sysconfig

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moejax.config.data import DataConfig, SourceConfig
from moejax.config.errors import ConfigError
from moejax.data.mixture import is_heldout, open_splits
from moejax.data.sources import DataError, open_source, stdlib

FILES = ("x.txt", "x.jsonl", "x.parquet", "y.parquet")
TEXTS = ["one\r\ntwo\n", "ünï\x00code 漢字 🙂", "", "last"]


def documents(source):
    return {source[index].name: source[index].text for index in range(len(source))}


def test_text_files_come_back_byte_by_byte_under_their_relative_names(tmp_path):
    (tmp_path / "deep").mkdir()
    names = ["b.txt", "a.txt", "deep/c.txt", "deep/d.txt"]
    for name, text in zip(names, TEXTS, strict=True):
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "other.md").write_text("left out")
    source = open_source(SourceConfig(kind="text", path=str(tmp_path / "**" / "*.txt")))
    assert documents(source) == dict(zip(names, TEXTS, strict=True))
    assert [source.name(index) for index in range(4)] == sorted(names)
    single = open_source(SourceConfig(kind="text", path=str(tmp_path / "a.txt")))
    assert documents(single) == {"a.txt": TEXTS[1]}


def test_jsonl_records_come_back_under_file_and_line(tmp_path):
    lines = [json.dumps({"id": 1, "body": text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(TEXTS)]
    (tmp_path / "x.jsonl").write_text("\n".join([lines[0], "", *lines[1:3]]) + "\n", encoding="utf-8")
    (tmp_path / "y.jsonl").write_text(lines[3], encoding="utf-8")
    source = open_source(SourceConfig(kind="jsonl", path=str(tmp_path / "*.jsonl"), field="body"))
    assert documents(source) == {"x.jsonl#1": TEXTS[0], "x.jsonl#3": TEXTS[1], "x.jsonl#4": TEXTS[2], "y.jsonl#1": TEXTS[3]}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_parquet_rows_come_back_under_file_and_row(tmp_path, kind):
    for name, texts in (("x.parquet", TEXTS), ("y.parquet", TEXTS[::-1])):
        pq.write_table(pa.table({"n": range(4), "body": pa.array(texts, kind)}), tmp_path / name, row_group_size=3)
    source = open_source(SourceConfig(kind="parquet", path=str(tmp_path / "*.parquet"), field="body"))
    want = {f"x.parquet#{row}": text for row, text in enumerate(TEXTS)} | {f"y.parquet#{row}": text for row, text in enumerate(TEXTS[::-1])}
    assert documents(source) == want


def test_the_standard_library_leaves_out_packages_and_names_what_is_no_text():
    source = stdlib()
    names = [source.name(index) for index in range(len(source))]
    assert names == sorted(names) and "json/decoder.py" in names
    assert not any("site-packages" in name or "dist-packages" in name for name in names)
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    index = names.index("json/decoder.py")
    assert source[index].text == (root / "json" / "decoder.py").read_bytes().decode()
    for name in source.skipped:
        with pytest.raises(UnicodeDecodeError):
            (root / name).read_bytes().decode()


def test_a_library_in_a_folder_named_like_a_package_folder_is_still_read(tmp_path, monkeypatch):
    root = tmp_path / "site-packages" / "lib"
    (root / "site-packages").mkdir(parents=True)
    (root / "good.py").write_text("x = 1\n")
    (root / "bad.py").write_bytes(b"# \xff\n")
    (root / "site-packages" / "package.py").write_text("y = 2\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    source = stdlib()
    assert documents(source) == {"good.py": "x = 1\n"} and source.skipped == ["bad.py"]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "ok"', r"x\.jsonl, line 2: not JSON"),
        ("[1, 2]", r"x\.jsonl, line 2: .*must be an object.* got list"),
        ('{"txt": "a", "id": 3}', r"x\.jsonl, line 2: no field 'text'; the record has 'txt', 'id'"),
        ('{"text": 5}', r"x\.jsonl, line 2: field 'text' must be a string, got int 5"),
        (b'{"text": "\xff"}', r"x\.jsonl, line 2: not UTF-8, byte 10 is 0xff"),
        ('{"text": "ab\\ud800"}', r"x\.jsonl, line 2: field 'text' is no text: character 2 is the lone surrogate '\\ud800'"),
        ('{"text": "a", "id": ' + "9" * 5000 + "}", r"x\.jsonl, line 2: not JSON \(Exceeds the limit"),
        ('{"text": ' + "[" * 200_000, r"x\.jsonl, line 2: not JSON"),
    ],
)
def test_a_wrong_record_is_named_with_its_line_and_what_is_there(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    source = open_source(SourceConfig(kind="jsonl", path=str(tmp_path / "x.jsonl")))
    with pytest.raises(DataError, match=message):
        source[1]


def test_a_misspelt_field_shows_when_the_source_is_opened(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n')
    pq.write_table(pa.table({"text": ["a", None], "n": [1, 2]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="no field 'txet'; the record has 'text'"):
        open_source(SourceConfig(kind="jsonl", path=str(tmp_path / "x.jsonl"), field="txet"))
    with pytest.raises(DataError, match=r"x\.parquet: no column 'txet'; the file has 'text', 'n'"):
        open_source(SourceConfig(kind="parquet", path=str(tmp_path / "x.parquet"), field="txet"))
    with pytest.raises(DataError, match="column 'n' must hold strings, it holds int64"):
        open_source(SourceConfig(kind="parquet", path=str(tmp_path / "x.parquet"), field="n"))
    with pytest.raises(DataError, match=r"x\.parquet, row 1: column 'text' is null"):
        open_source(SourceConfig(kind="parquet", path=str(tmp_path / "x.parquet")))[1]
    with pytest.raises(DataError, match=r"x\.jsonl: not a parquet file"):
        open_source(SourceConfig(kind="parquet", path=str(tmp_path / "x.jsonl")))


def test_text_that_is_not_utf8_is_named_with_its_place(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"abc\xe9")
    with pytest.raises(DataError, match=r"x\.txt: not UTF-8, byte 3 is 0xe9"):
        open_source(SourceConfig(kind="text", path=str(tmp_path / "x.txt")))[0]


def test_a_path_that_matches_nothing_says_what_is_there(tmp_path):
    (tmp_path / "there.txt").write_text("")
    for path in ("missing.txt", "*.jsonl", "gone/*.txt", "."):
        with pytest.raises(ConfigError, match=r"matches no file.* holds 1 entries: there\.txt"):
            open_source(SourceConfig(kind="text", path=str(tmp_path / path)))
    with pytest.raises(ConfigError, match="holds no document"):
        open_source(SourceConfig(kind="jsonl", path=str(tmp_path / "there.txt")))


def test_training_and_heldout_documents_are_disjoint_and_complete():
    config = DataConfig(heldout_percent=5)
    (train,), (heldout,) = open_splits(config).values()
    names = [{split.name(index) for index in range(len(split))} for split in (train, heldout)]
    assert not names[0] & names[1] and len(names[0] | names[1]) == len(train.source)
    assert 0.03 < len(heldout) / len(train.source) < 0.07
    assert train[0].name == train.name(0) and heldout[0].name == heldout.name(0)


def test_a_document_s_split_depends_on_its_name_alone(tmp_path):
    for number in range(50):
        (tmp_path / f"{number}.txt").write_text("x")
    config = DataConfig(sources=(SourceConfig(kind="text", path=str(tmp_path / "*.txt")),), heldout_percent=20)
    (heldout,) = open_splits(config)["heldout"]
    before = {heldout.name(index) for index in range(len(heldout))}
    for number in range(50, 100):
        (tmp_path / f"{number}.txt").write_text("x")
    (heldout,) = open_splits(config)["heldout"]
    assert before == {name for name in (heldout.name(index) for index in range(len(heldout))) if int(name[:-4]) < 50}
    assert [name for name in ("abc.py", "json/decoder.py", "asyncio/locks.py", "os.py") if is_heldout(name, 50)] == ["abc.py"]


def test_a_split_without_a_document_is_an_error_that_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    config = DataConfig(sources=(SourceConfig(kind="text", path=str(tmp_path / "a.txt")),), heldout_percent=1)
    assert not is_heldout("a.txt", 1)
    with pytest.raises(ConfigError, match=r"data\.sources\[0\].* has no heldout document: .*heldout_percent=1 keeps 0 of its 1"):
        open_splits(config)


def test_a_file_that_is_gone_or_broken_when_it_is_read_is_an_error_that_names_it(tmp_path):
    (tmp_path / "x.txt").write_text("a")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    binary = pa.array([b"fine", b"\xff"])
    strings = pa.Array.from_buffers(pa.string(), 2, binary.buffers())
    pq.write_table(pa.table({"text": strings}), tmp_path / "x.parquet")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "y.parquet")
    opened = {name: open_source(SourceConfig(kind=name.split(".")[1].replace("txt", "text"), path=str(tmp_path / name))) for name in FILES}
    with pytest.raises(DataError, match=r"x\.parquet, row group 0: column 'text' cannot be read \(.*UTF8"):
        opened["x.parquet"][1]
    for name in ("x.txt", "x.jsonl", "y.parquet"):
        (tmp_path / name).unlink()
        with pytest.raises(DataError, match=rf"{name}.* cannot be read \(.*No such file"):
            opened[name][0]
