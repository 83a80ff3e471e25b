"""Matmuls between activations and master weights: the precision contract in one place."""

import functools

import jax
import jax.numpy as jnp


def project(spec: str, x, w) -> jax.Array:
    """`einsum(spec, x, w)` in x's dtype; the weight's gradient is a product accumulated, and reduced over devices, in w's dtype.

    Args:
      spec: "a,b->c" where every index of `a` and of `b` is in `c` or in the other one.
      x: activations, e.g. bfloat16.
      w: master weight, e.g. float32; cast to x's dtype for the product.
    """
    return _project(spec, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(spec, x, w):
    return jnp.einsum(spec, x, w.astype(x.dtype))


def _save(spec, x, w):
    return _project(spec, x, w), (x, w)


def _grads(spec, saved, dy):
    x, w = saved
    (in_x, in_w), out = spec.split("->")[0].split(","), spec.split("->")[1]
    dx = jnp.einsum(f"{out},{in_w}->{in_x}", dy, w.astype(x.dtype))
    dw = jnp.einsum(f"{in_x},{out}->{in_w}", x, dy, preferred_element_type=w.dtype)
    return dx, dw.astype(w.dtype)


_project.defvjp(_save, _grads)


def float_inside(x):
    """x in the dtype of delicate arithmetic: float32, or float64 if x is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
