"""Products that have the same bits in every program."""

import jax.numpy as jnp


def rounded(product):
    """The product, rounded before something is added to it.

    LLVM makes one operation of a product and a sum, which rounds once in place of twice, where it sees both and the product has no other
    reader; so the bits would depend on what else stands in the program. It does not look through a minimum, which costs no memory.
    All values stay what they are, NaN too, but for +inf, which becomes the largest finite one.
    """
    return jnp.minimum(product, jnp.finfo(product.dtype).max)
