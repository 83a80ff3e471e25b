"""Named results of a traced program: which there are, and how many bytes each has on one device."""

import jax
import jax.extend.core


def equations(jaxpr, inside: bool = False):
    """All equations, and whether each stands in an island, where arrays are a device's own."""
    for eqn in jaxpr.eqns:
        yield eqn, inside
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner, inside or eqn.primitive.name == "shard_map")


def named_bytes(jaxpr, shards: int = 1) -> dict[str, int]:
    """Bytes on one device of each name's arrays. Outside of islands rows are split over devices; the loads of experts are not."""
    found: dict[str, int] = {}
    for eqn, inside in equations(jaxpr.jaxpr):
        if eqn.primitive.name == "name":
            name, like = eqn.params["name"], eqn.outvars[0].aval
            parts = 1 if inside or name == "dispatch_plan" else shards
            found[name] = found.get(name, 0) + like.size * like.dtype.itemsize // parts
    return found
