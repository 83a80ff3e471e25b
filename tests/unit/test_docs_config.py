"""The tables of docs/config.md say what the dataclasses say. `python tests/unit/test_docs_config.py` writes them anew."""

import ast
import dataclasses
import inspect
import itertools
import pathlib
import textwrap
import typing
from collections.abc import Iterator

from moejax.config.data import SourceConfig
from moejax.config.run import RunConfig
from moejax.config.training import GroupConfig

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "config.md"
MARK = "<!-- made by tests/unit/test_docs_config.py -->\n"


def meanings(group: type) -> dict[str, str]:
    """Each field's docstring: the string that follows it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(group))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }  # type: ignore[union-attr]


def spell(kind: typing.Any) -> str:
    """A field's type, the values of a choice written out."""
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    return f"{typing.get_args(kind)[0].__name__} ..." if typing.get_origin(kind) is tuple else kind.__name__


def table(group: type, prefix: str) -> Iterator[str]:
    """Rows of a group, then the tables of the groups inside it."""
    kinds, text = typing.get_type_hints(group), meanings(group)
    fields = [field for field in dataclasses.fields(group) if not dataclasses.is_dataclass(kinds[field.name])]
    title = prefix.rstrip(".") or "The run itself"
    yield f"### {title}\n\n{(group.__doc__ or '').strip()}\n\n| field | value | default | meaning |\n|---|---|---|---|\n"
    for field in fields:
        default = "required" if field.default is dataclasses.MISSING else f"`{_short(field.default)}`"
        yield f"| `{prefix}{field.name}` | {spell(kinds[field.name])} | {default} | {text[field.name].replace('|', chr(92) + '|')} |\n"
    yield "\n"
    for field in dataclasses.fields(group):
        if dataclasses.is_dataclass(kinds[field.name]):
            yield from table(kinds[field.name], f"{prefix}{field.name}.")


def _short(value: typing.Any) -> str:
    """A default as the command line has it; of groups the type alone."""
    if isinstance(value, tuple):
        return " ".join(f"{type(entry).__name__}()" if dataclasses.is_dataclass(entry) else str(entry) for entry in value) or "()"
    return repr(value)


def tables() -> str:
    """All groups, and the entries of the two fields that hold several."""
    parts = [*table(RunConfig, ""), *table(SourceConfig, "data.sources.0."), *table(GroupConfig, "optim.groups.0.")]
    return "".join(parts).rstrip() + "\n"


def test_the_page_lists_every_field_as_it_is():
    assert PAGE.read_text().partition(MARK)[2] == tables(), "docs/config.md is out of date: python tests/unit/test_docs_config.py"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + tables())
