"""Documents by number: files, records of files, and the source of the interpreter's own library.

Each source is a random-access data source of grain: `len(source)` and `source[index] -> Document`. Names are known without
reading the text, since they choose the held-out documents.
"""

import contextlib
import dataclasses
import functools
import glob
import itertools
import json
import os
import pathlib
import sysconfig
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from moejax.config.data import SourceConfig
from moejax.config.errors import ConfigError


class DataError(ValueError):
    """Data that is not what the config says. The message names the file, the record and what is there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One text, never joined with another."""

    name: str
    """Path below the source's root; records add `#` and their line (jsonl, from 1) or row (parquet, from 0)."""
    text: str
    prompt: str = ""
    """What stands before the text and is not learned."""


class Source(Protocol):
    """Documents by number."""

    skipped: Sequence[str]
    """Names of files left out because they cannot be read as UTF-8 text."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Document: ...
    def name(self, index: int) -> str:
        """Name of a document, without reading its text."""
        ...


class Files:
    """One document a file, read anew at each access."""

    def __init__(self, root: pathlib.Path, names: list[str], skipped: Sequence[str] = ()):
        self._root, self._names, self.skipped = root, names, skipped

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Document:
        path = self._root / self._names[index]
        with _reading(path):
            raw = path.read_bytes()
        return Document(self._names[index], _decode(raw, str(path)))

    def name(self, index: int) -> str:
        """Path below the root."""
        return self._names[index]


class JsonLines:
    """One document a line. Blank lines are no records."""

    skipped: Sequence[str] = ()

    def __init__(self, root: pathlib.Path, names: list[str], field: str, prompt_field: str = ""):
        self._root, self._names, self._field, self._prompt_field = root, names, field, prompt_field
        places = ((file, line, start) for file, name in enumerate(names) for line, start in _line_starts(root / name))
        self._places_N3 = np.fromiter(itertools.chain.from_iterable(places), np.int64).reshape(-1, 3)  # file, line from 1, first byte
        if len(self):
            self[0]  # a wrong field shows now, not in the loader's thread

    def __len__(self) -> int:
        return len(self._places_N3)

    def __getitem__(self, index: int) -> Document:
        file, line, start = map(int, self._places_N3[index])
        path = self._root / self._names[file]
        with _reading(path), path.open("rb") as stream:
            stream.seek(start)
            raw = stream.readline()
        place = f"{path}, line {line}"
        prompt = _text_of(raw, self._prompt_field, place) if self._prompt_field else ""
        return Document(self.name(index), _text_of(raw, self._field, place), prompt)

    def name(self, index: int) -> str:
        """Path below the root, `#`, line."""
        file, line, _ = map(int, self._places_N3[index])
        return f"{self._names[file]}#{line}"


class Parquet:
    """One document a row. A row group is read as a whole and the last few are kept, so small groups make random access cheap."""

    skipped: Sequence[str] = ()

    def __init__(self, root: pathlib.Path, names: list[str], field: str, prompt_field: str = ""):
        self._root, self._names, self._field, self._prompt_field = root, names, field, prompt_field
        groups, rows = [], []
        for file, name in enumerate(names):
            for each in filter(None, (field, prompt_field)):
                metadata = _parquet_file(root / name, each).metadata
            first = 0
            for group in range(metadata.num_row_groups):
                groups.append((file, group, first))
                rows.append(metadata.row_group(group).num_rows)
                first += rows[-1]
        self._groups = groups  # file, group of the file, its first row in the file
        self._starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._column = functools.lru_cache(maxsize=8 if prompt_field else 4)(self._read_column)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Document:
        return Document(
            self.name(index), self._text(index, self._field), self._text(index, self._prompt_field) if self._prompt_field else ""
        )

    def name(self, index: int) -> str:
        """Path below the root, `#`, row."""
        group, row = self._find(index)
        return f"{self._names[self._groups[group][0]]}#{row}"

    def _text(self, index: int, field: str) -> str:
        group, row = self._find(index)
        text = self._column(group, field)[int(index - self._starts[group])].as_py()
        if text is None:
            raise DataError(f"{self._root / self._names[self._groups[group][0]]}, row {row}: column {field!r} is null, not a string.")
        return text

    def _find(self, index: int) -> tuple[int, int]:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        return group, int(self._groups[group][2] + index - self._starts[group])

    def _read_column(self, group: int, field: str):
        import pyarrow as pa

        file, group_of_file, _ = self._groups[group]
        path = self._root / self._names[file]
        try:
            column = _parquet_file(path, field).read_row_group(group_of_file, columns=[field]).column(0)
            column.validate(full=True)  # strings that are no UTF-8 among it
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}, row group {group_of_file}: column {field!r} cannot be read ({error}).") from error
        return column


def stdlib() -> Files:
    """The Python standard library's *.py files on this machine, by sorted relative path.

    Left out: installed packages (site-packages, dist-packages) and, by name in `skipped`, files that are not UTF-8 or
    cannot be read; the library's own tests carry some that are broken on purpose.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    names, skipped = [], []
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if {"site-packages", "dist-packages"} & set(name.split("/")):
            continue
        try:
            (root / name).read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            skipped.append(name)
        else:
            names.append(name)
    return Files(root, names, skipped)


def open_source(config: SourceConfig) -> Source:
    """The source that one entry of `data.sources` names.

    Raises:
      ConfigError: the path matches no file, or the source holds no document.
      DataError: a file is not of its kind, or its first record has no such field.
    """
    if config.kind == "stdlib":
        source = stdlib()
    else:
        root, names = _find_files(config)
        match config.kind:
            case "text":
                source = Files(root, names)
            case "jsonl":
                source = JsonLines(root, names, config.field, config.prompt_field)
            case "parquet":
                source = Parquet(root, names, config.field, config.prompt_field)
    if not len(source):
        raise ConfigError(f"data.sources: kind={config.kind!r}, path={config.path!r} holds no document.")
    return source


def _find_files(config: SourceConfig) -> tuple[pathlib.Path, list[str]]:
    """Root and sorted names below it; the root is what of the path has no wildcard, so moving it keeps all names."""
    pattern = pathlib.Path(config.path).expanduser()
    fixed = pathlib.Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    root = fixed if fixed != pattern else pattern.parent
    files = [pathlib.Path(path) for path in glob.glob(str(pattern), recursive=True) if os.path.isfile(path)]
    if not files:
        there = next(folder for folder in (pattern, root, *root.absolute().parents) if folder.is_dir())
        listed = sorted(os.listdir(there))
        raise ConfigError(
            f"data.sources: path={config.path!r} (kind={config.kind!r}) matches no file. {there.absolute()} holds "
            f"{len(listed)} entries{': ' if listed else ''}{', '.join(listed[:8])}{', ...' if len(listed) > 8 else ''}."
        )
    return root, sorted(path.relative_to(root).as_posix() for path in files)


@contextlib.contextmanager
def _reading(path: pathlib.Path):
    """A file that cannot be read, or not any more, is an error of the data."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8, byte {error.start} is 0x{raw[error.start]:02x}.") from error


def _line_starts(path: pathlib.Path):
    start = 0
    with _reading(path), path.open("rb") as stream:
        for line, raw in enumerate(stream, 1):
            if raw.strip():
                yield line, start
            start += len(raw)


def _text_of(raw: bytes, field: str, place: str) -> str:
    line = _decode(raw, place)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a bare ValueError
        raise DataError(f"{place}: not JSON ({error}); the line starts {raw[:60]!r}.") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: a record must be an object with the field {field!r}, got {type(record).__name__}.")
    if field not in record:
        raise DataError(f"{place}: no field {field!r}; the record has {', '.join(map(repr, record)) or 'none'}.")
    if not isinstance(record[field], str):
        raise DataError(f"{place}: field {field!r} must be a string, got {type(record[field]).__name__} {str(record[field])[:60]}.")
    try:
        record[field].encode("utf-8")
    except UnicodeEncodeError as error:
        lone = record[field][error.start]
        raise DataError(f"{place}: field {field!r} is no text: character {error.start} is the lone surrogate {lone!r}.") from error
    return record[field]


def _parquet_file(path: pathlib.Path, field: str):
    import pyarrow as pa  # half a second that only parquet needs
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file ({error}).") from error
    schema = file.schema_arrow
    if field not in schema.names:
        raise DataError(f"{path}: no column {field!r}; the file has {', '.join(map(repr, schema.names))}.")
    kind = schema.field(field).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{path}: column {field!r} must hold strings, it holds {kind}.")
    return file
