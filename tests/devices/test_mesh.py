"""Meshes that others made."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from moejax.config.errors import ConfigError
from moejax.parallel.mesh import complete, mesh_from


def test_a_mesh_with_some_axes_in_any_order_gets_the_others_with_size_1():
    given = jax.make_mesh((4, 2), ("expert", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    whole = complete(given)
    assert dict(whole.shape) == {"pipe": 1, "data": 1, "fsdp": 2, "expert": 4, "context": 1, "tensor": 1}
    assert set(whole.axis_types) == {AxisType.Auto}
    assert whole.devices[0, 0, 1, 3, 0, 0] == given.devices[3, 1]
    assert np.array_equal(complete(whole).devices, whole.devices)


def test_unknown_and_unbuilt_axes_are_refused_by_name():
    with pytest.raises(ConfigError, match="experts"):
        complete(jax.make_mesh((8,), ("experts",), axis_types=(AxisType.Auto,)))
    with pytest.raises(ConfigError, match=r"mesh\.tensor=8"):
        complete(jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,)))


def test_mesh_from_takes_the_first_devices():
    assert list(mesh_from(fsdp=2).devices.flat) == jax.devices()[:2]
