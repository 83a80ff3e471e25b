import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.losses.cross_entropy import cross_entropy

B, L, D, V = 8, 10, 6, 9
ROWS = ("fsdp", "expert")


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    weights_BL = rng.random((B, L)).astype(np.float32)
    weights_BL[3] = 0  # this device has no label
    return (
        rng.standard_normal((B, L, D)).astype(np.float32),
        rng.standard_normal((D, V)).astype(np.float32),
        rng.integers(0, V, (B, L)).astype(np.int32),
        weights_BL,
    )


def loss_sum(hidden_BLD, unembed_DV, targets_BL, weights_BL):
    return cross_entropy(hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef=0.1, chunk_tokens=4).loss_sum


def test_rows_over_8_devices_equal_one_device_with_a_single_reduction_of_the_head(arrays):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ROWS)
    specs = (P(ROWS), P(), P(ROWS), P(ROWS))

    @jax.shard_map(mesh=mesh, in_specs=specs, out_specs=P())
    def island(hidden_BLD, unembed_DV, targets_BL, weights_BL):
        unembed_DV = jax.lax.pcast(unembed_DV, ROWS, to="varying")
        return jax.lax.psum(loss_sum(hidden_BLD, unembed_DV, targets_BL, weights_BL), ROWS)

    want = jax.jit(jax.value_and_grad(loss_sum, argnums=(0, 1)))(*arrays)
    on_mesh = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]
    for function in (loss_sum, island):
        both = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))
        for got, expected in zip(jax.tree.leaves(both(*on_mesh)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    program = both.lower(*on_mesh).compile().as_text()
    assert len(re.findall(rf"f32\[{D},{V}\]\S* all-reduce\(", program)) <= 1  # may be merged with the loss
    assert not [line for line in program.splitlines() if " all-reduce(" in line and "/while/" in line]
