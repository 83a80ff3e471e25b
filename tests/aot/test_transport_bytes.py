"""experiments/transport_bytes says what each transport sends: the module and the formula agree."""

import pytest
from scripts import scripts

pytestmark = pytest.mark.aot


@pytest.fixture(scope="module")
def experiment():
    with scripts("experiments/transport_bytes", "run") as (module,):
        yield module


def test_bytes_to_other_nodes_are_those_of_the_formula_and_a_node_takes_each_token_once(experiment):
    flat, by_node = (experiment.measure(transport, 1.1) for transport in ("all_to_all", "hierarchical"))
    for row in (flat, by_node):
        assert row.across == pytest.approx(row.formula, rel=0.02), row
    assert by_node.across <= 0.48 * flat.across


def test_ragged_compiles_for_gpus_with_gradients(experiment):
    assert experiment.ragged_exchanges() == 4
