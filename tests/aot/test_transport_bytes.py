"""experiments/transport_bytes says what each transport sends: the module and the formula agree."""

import importlib.util
import pathlib
import sys

import pytest

pytestmark = pytest.mark.aot
PATH = pathlib.Path(__file__).parents[2] / "experiments" / "transport_bytes" / "run.py"


@pytest.fixture(scope="module")
def experiment():
    spec = importlib.util.spec_from_file_location("transport_bytes", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_bytes_to_other_nodes_are_those_of_the_formula_and_a_node_takes_each_token_once(experiment):
    flat, by_node = (experiment.measure(transport, 1.1) for transport in ("all_to_all", "hierarchical"))
    for row in (flat, by_node):
        assert row.across == pytest.approx(row.formula, rel=0.02), row
    assert by_node.across <= 0.48 * flat.across


def test_ragged_compiles_for_gpus_with_gradients(experiment):
    assert experiment.ragged_exchanges() == 4
