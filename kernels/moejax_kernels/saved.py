"""Names of what ops keep for the backward pass beside their inputs (`jax.ad_checkpoint.checkpoint_name`).

They stand in the forward rules, where a policy of `jax.checkpoint` sees them: it keeps all that a name marks, moves it to the host, or
lets the op run again. An output that is kept has the name too, else the op would run again for it.
"""

ATTENTION = "attention"
"""Output of softmax attention, and its log-sum-exp."""
CHUNK_STATES = "chunk_states"
"""Output of a delta rule, and what is kept of its chunks: states and small matrices."""
EXPERT_HIDDEN = "expert_hidden"
"""Results of the experts' gate and up projections."""
