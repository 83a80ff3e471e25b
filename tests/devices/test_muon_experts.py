import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.optim.muon import scale_by_muon


def test_each_device_orthogonalises_its_own_experts_without_a_collective():
    transform = scale_by_muon()
    step = jax.jit(lambda grads: transform.update(grads, transform.init(grads))[0])
    gate_EDF = np.random.default_rng(0).standard_normal((3, 8, 6, 4)).astype(np.float32)
    alone = {"unit": {"0": {"gate_EDF": gate_EDF}}}
    mesh = Mesh(np.array(jax.devices()), ("expert",))
    sharded = jax.device_put(alone, NamedSharding(mesh, P(None, "expert")))
    program = step.lower(sharded).compile().as_text()
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", program)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=1e-6), step(sharded), step(alone))
