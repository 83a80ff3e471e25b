"""Which rule moves which parameter: read off its path, its shape and the config's groups."""

import dataclasses
import math
import re
from typing import Literal

import jax

from moejax.config.errors import ConfigError, regular_expression, require
from moejax.config.training import GroupConfig, OptimConfig

Algorithm = Literal["adamw", "muon", "sgd", "frozen", "balance"]
VECTORS = frozenset({"scale", "bias", "log", "ape", "base", "sinks"})
"""Last words of the names (`dt_bias_HC`, `A_log_H`) of what scales, shifts or gates each channel, whatever its shape."""
GATES = frozenset(
    {"gate_DHM", "gate_down_DR", "gate_up_RHM", "beta_DH", "decay_down_DR", "decay_up_RHC", "ba_DGX", "pool_gate_DC", "mix_XZ"}
)
"""Names of the matrices that make gates and decays from a token: output gates, beta and decay of the delta rules, weights of index pools
and of hyper-connections. Not the gate matrices of MLPs (`gate_DF`, `gate_EDF`), nor gates inside a wider projection (`qkvz_DGX` of GDN,
`q_DHX` of gated GQA), which are one weight with the rest."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How one parameter moves."""

    algorithm: Algorithm
    """`frozen` and `balance` (the router's correction bias, which the train step moves by load) have no state and no update."""
    learning_rate: float
    """Peak learning rate, the group's factor included."""
    weight_decay: float
    """Decoupled: each update takes learning rate * weight_decay * parameter."""
    group: str = ""
    """Pattern of the config's group that claimed the parameter, if one did."""

    @property
    def trainable(self) -> bool:
        """Does the optimizer move it?"""
        return self.algorithm not in ("frozen", "balance")


def assign(config: OptimConfig, params_like, *, train_only: str = ""):
    """A Rule for each parameter, in a tree like `params_like`.

    Muon takes matrices, but neither embedding and output projection, as its author advises, nor the router, whose columns must move
    apart and not be made orthogonal; the rest is AdamW's. Matrices decay, the router among them; GATES and vectors do not, unless a
    group names a decay for them. Vectors are all of one dim per layer or expert, VECTORS, depthwise filters.

    Args:
      config: optimizer, rates, decay and groups.
      params_like: nested dict of arrays or shapes.
      train_only: regular expression searched in the path; what it does not match is frozen. Empty: nothing is.

    Raises:
      ConfigError: a pattern is no regular expression, a group has no parameter that an earlier one has not taken, train_only matches
        nothing, or a name says another number of dims than the parameter has.
    """
    patterns = [regular_expression(f"optim.groups[{i}].pattern", group.pattern) for i, group in enumerate(config.groups)]
    wanted = regular_expression("train.train_only", train_only)
    shapes = {path_of(keys): leaf.shape for keys, leaf in jax.tree_util.tree_leaves_with_path(params_like)}
    movable = [path for path in shapes if not _is_balance(path)]
    claims = {path: next((i for i, pattern in enumerate(patterns) if pattern.search(path)), None) for path in movable}
    for i, group in enumerate(config.groups):
        require(
            i in claims.values(),
            f"optim.groups: pattern={group.pattern!r} claims no parameter: none matches, or earlier groups took "
            f"them. Paths look like {_some(movable)}.",
        )
    require(
        any(wanted.search(path) for path in movable),
        f"train.train_only={train_only!r} matches no parameter. Paths look like {_some(movable)}.",
    )

    def rule(path: str) -> Rule:
        if _is_balance(path):
            return Rule(algorithm="balance", learning_rate=0.0, weight_decay=0.0)
        claim = claims[path]
        group = GroupConfig(pattern="") if claim is None else config.groups[claim]
        if group.lr_scale == 0 or not wanted.search(path):
            return Rule(algorithm="frozen", learning_rate=0.0, weight_decay=0.0, group=group.pattern)
        matrix = is_matrix(path, shapes[path])
        decays = matrix and path.rsplit("/", 1)[-1] not in GATES
        algorithm = _algorithm(config.kind, path, matrix)
        if algorithm == "muon":
            matrix_shape(path, shapes[path])  # raises here rather than in the first step
        rate = config.muon_learning_rate if algorithm == "muon" else config.learning_rate
        decay = group.weight_decay if group.weight_decay >= 0 else config.weight_decay * decays
        return Rule(algorithm=algorithm, learning_rate=rate * group.lr_scale, weight_decay=decay, group=group.pattern)

    return jax.tree_util.tree_map_with_path(lambda keys, _: rule(path_of(keys)), params_like)


def table(rules, params_like) -> list[tuple[str, int, int, float, float]]:
    """Rows (label, tensors, parameters, peak learning rate, weight decay), one per kind of rule, the most parameters first."""
    sizes: dict[Rule, list[int]] = {}
    for rule, leaf in zip(jax.tree.leaves(rules), jax.tree.leaves(params_like), strict=True):
        sizes.setdefault(rule, []).append(math.prod(leaf.shape))
    lines = []
    for rule, of_rule in sizes.items():
        label = f"{rule.algorithm} ({rule.group})" if rule.group else rule.algorithm
        lines.append((label, len(of_rule), sum(of_rule), rule.learning_rate, rule.weight_decay))
    return sorted(lines, key=lambda line: -line[2])


def path_of(keys) -> str:
    """A parameter's path, "/"-joined, e.g. `unit/0/feed_forward/experts/gate_EDF`."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def matrix_shape(path: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The dims of a parameter that stack matrices, those that make their rows (inputs), and those that make their columns.

    Of three dims a head (H, G, J) and the dim after it belong together: `q_DHC` is D x (H C), `out_HMD` is (H M) x D.

    Raises:
      ConfigError: the name does not tell rows from columns.
    """
    num_stacked, letters = _inner_dims(path, shape)
    stack, inner = shape[:num_stacked], shape[num_stacked:]
    heads = [letter in "HGJ" for letter in letters]
    if len(inner) == 2 or heads == [False, True, False]:
        return stack, inner[:1], inner[1:]
    if heads == [True, False, False]:
        return stack, inner[:2], inner[2:]
    raise ConfigError(
        f"parameter {path} of shape {shape}: its name does not tell Muon rows from columns; three dims must be like DHC "
        "or HMD. Rename it, or use optim.kind='adamw'."
    )


def is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter, each layer and expert of it alone, maps channels to channels, and does not scale, shift or gate each."""
    num_stacked, letters = _inner_dims(path, shape)
    num_dims = len(shape) - num_stacked - letters.count("1")  # `shared_gate_D1` is a vector
    return num_dims >= 2 and _name(path)[0].rsplit("_", 1)[-1] not in VECTORS and "conv" not in path


def _inner_dims(path: str, shape: tuple[int, ...]) -> tuple[int, list[str]]:
    """How many leading dims stack layers (the first in `unit/`) and experts (E first in a name), and the names of the others, if told."""
    _, letters = _name(path)
    num_stacked = int(path.startswith("unit/"))
    require(
        not letters or len(letters) == len(shape) - num_stacked,
        f"parameter {path} has shape {shape}, but its name tells "
        f"{len(letters)} dims{' after the one that stacks layers' if num_stacked else ''}. Rename it.",
    )
    if letters[:1] == ["E"] and "router" not in path.split("/"):
        return num_stacked + 1, letters[1:]
    return num_stacked, letters


def _name(path: str) -> tuple[str, list[str]]:
    """`.../gate_EDF` -> `gate` and its dims E, D, F; `.../A_log` -> `A_log` and none."""
    leaf = path.rsplit("/", 1)[-1]
    stem, _, letters = leaf.rpartition("_")
    return (stem, re.findall(r"[A-Z]|\d+", letters)) if re.fullmatch(r"([A-Z]|\d+)+", letters) else (leaf, [])


def _algorithm(kind: str, path: str, is_matrix: bool) -> Algorithm:
    sections = path.split("/")
    if kind == "muon" and is_matrix and sections[0] not in ("embed", "unembed") and "router" not in sections:
        return "muon"
    return "sgd" if kind == "sgd" else "adamw"


def _is_balance(path: str) -> bool:
    return path.endswith("router/bias_E")


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:: max(len(paths) // 4, 1)][:4])
