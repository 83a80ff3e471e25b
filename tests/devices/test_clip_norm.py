import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.optim.clip import clip, global_norm


def test_clip_norm_on_sharded_experts_equals_that_of_one_device():
    rng = np.random.default_rng(0)
    grads = {"experts": rng.standard_normal((8, 4, 6)).astype(np.float32), "dense": rng.standard_normal((8, 6)).astype(np.float32)}
    grads["experts"][5:] = 0  # some devices' experts got no token
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "expert"))
    specs = {"experts": P("expert", "fsdp"), "dense": P(("fsdp", "expert"))}
    sharded = jax.tree.map(lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)), grads, specs)
    clipped = jax.jit(lambda grads: (clip(grads, norm := global_norm(grads), 1.0), norm))
    got, norm = clipped(sharded)
    want, want_norm = clipped(jax.tree.map(jnp.asarray, grads))
    by_hand = np.sqrt(sum(np.sum(array.astype(np.float64) ** 2) for array in grads.values()))
    np.testing.assert_allclose(want_norm, by_hand, rtol=1e-6)
    assert len(norm.addressable_shards) == 8
    for shard in norm.addressable_shards:
        np.testing.assert_allclose(shard.data, by_hand, rtol=1e-6)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-6), got, want)
