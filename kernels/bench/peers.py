"""The same results by other libraries on a GPU, each where it is installed: PyTorch, flash-linear-attention, Liger, tokamax.

A peer is a function of a `Call`'s arrays that returns outputs, differentiable by its own library. PyTorch's run in PyTorch, on copies
of the same numbers.
"""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Peer:
    """One library's way to an op."""

    library: str
    needs: str
    """Module that must be there."""
    build: Callable
    """`build(case)` -> function of the inputs by name; None where the library has nothing for the case."""
    torch: bool = True

    @property
    def missing(self) -> str | None:
        """Why it cannot run here."""
        return None if importlib.util.find_spec(self.needs.split(".")[0]) else f"{self.needs} is not installed"


def to_torch(array, *, gradient: bool = False):
    """A copy on the GPU; bfloat16 goes by its bits, which numpy's own dtypes lack."""
    import torch

    host, is_bfloat16 = np.asarray(array), array.dtype == jnp.bfloat16
    tensor = torch.from_numpy((host.view(np.int16) if is_bfloat16 else host).copy())
    tensor = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
    return tensor.cuda().requires_grad_(gradient)


def from_torch(tensor) -> np.ndarray:
    """In float32, on the host."""
    return tensor.detach().float().cpu().numpy()


def _ends(case):
    """Borders of the documents, [0, ...], as one packed row of PyTorch."""
    import torch

    return torch.tensor(np.cumsum([0, *case.documents]), dtype=torch.int32, device="cuda")


def _of_packed_row(case) -> bool:
    """One row of documents without padding, as the libraries want it."""
    return case.rows == 1 and case.documents is not None and min(case.documents) > 0


def _fla_kda(case):
    from fla.ops.kda import chunk_kda

    def run(q_BLGC, k_BLGC, v_BLHM, g_BLHC, beta_BLH):
        return chunk_kda(q_BLGC, k_BLGC, v_BLHM, g_BLHC, beta_BLH, output_final_state=True, cu_seqlens=_ends(case))[:1]

    return run if _of_packed_row(case) else None


def _fla_gated_delta(case):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def run(q_BLGC, k_BLGC, v_BLHM, g_BLH, beta_BLH):
        return chunk_gated_delta_rule(q_BLGC, k_BLGC, v_BLHM, g_BLH, beta_BLH, output_final_state=True, cu_seqlens=_ends(case))[:1]

    return run if _of_packed_row(case) else None


def _fla_conv(case):
    from fla.modules.convolution import causal_conv1d

    def run(x_BLD, weight_D4):
        return (causal_conv1d(x_BLD, weight_D4, activation="silu", cu_seqlens=_ends(case))[0],)

    return run if _of_packed_row(case) else None


def _torch_attention(case):
    """One call for each document."""
    import torch

    def run(q_BLHC, k_BLGC, v_BLGM):
        outputs, start = [], 0
        for length in case.documents:
            q, k, v = (x[:, start : start + length].transpose(1, 2) for x in (q_BLHC, k_BLGC, v_BLGM))
            o = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=case.key_dim**-0.5, enable_gqa=case.heads != case.key_heads
            )
            outputs.append(o.transpose(1, 2))
            start += length
        return (torch.cat(outputs, 1),)

    return run if _of_packed_row(case) and case.window is None and not case.has_sinks else None


def _torch_grouped(case):
    import torch

    def run(x_RD, w_EDF, group_sizes_E):
        y_RF = torch._grouped_mm(x_RD, w_EDF, offs=torch.cumsum(group_sizes_E, 0, dtype=torch.int32))
        filled = (torch.arange(case.rows, device="cuda") < sum(case.sizes))[:, None]
        return (torch.where(filled, y_RF, torch.zeros_like(y_RF)),)

    return run


def _liger_swiglu(case):
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return (lambda gate_RF, up_RF: (LigerSiLUMulFunction.apply(gate_RF, up_RF),)) if dict(case.options)["kind"] == "swiglu" else None


def _torch_gather(case):
    del case

    def run(x_TD, plan):
        source_R = plan["source_R"]
        return (x_TD[source_R.clamp(min=0).long()] * (source_R >= 0)[:, None],)

    return run


def _tokamax_grouped(case):
    import tokamax

    del case
    return lambda x_RD, w_EDF, group_sizes_E: (tokamax.ragged_dot(x_RD, w_EDF, group_sizes_E),)


def _xla_grouped(case):
    del case
    return lambda x_RD, w_EDF, group_sizes_E: (jax.lax.ragged_dot(x_RD, w_EDF, group_sizes_E),)


def _tokamax_attention(case):
    """One call for each document."""
    import tokamax

    def run(q_BLHC, k_BLGC, v_BLGM):
        attend = functools.partial(tokamax.dot_product_attention, is_causal=True, scale=case.key_dim**-0.5)
        cuts = np.cumsum(case.documents)[:-1]
        parts = zip(*(jnp.split(x, cuts, axis=1) for x in (q_BLHC, k_BLGC, v_BLGM)), strict=True)
        return (jnp.concatenate([attend(*part) for part in parts], axis=1),)

    return run if _of_packed_row(case) and case.window is None and not case.has_sinks else None


PEERS = {
    "kda": [Peer("fla", "fla", _fla_kda)],
    "gated_delta": [Peer("fla", "fla", _fla_gated_delta)],
    "attention": [
        Peer("torch SDPA", "torch", _torch_attention),
        Peer("tokamax", "tokamax", _tokamax_attention, torch=False),
    ],
    "grouped_matmul": [
        Peer("torch", "torch", _torch_grouped),
        Peer("tokamax", "tokamax", _tokamax_grouped, torch=False),
        Peer("lax.ragged_dot", "jax", _xla_grouped, torch=False),
    ],
    "causal_conv": [Peer("fla", "fla", _fla_conv)],
    "gated_activation": [Peer("liger", "liger_kernel", _liger_swiglu)],
    "permute": [Peer("torch gather", "torch", _torch_gather)],
}
"""Op -> who else has it. Nobody trains sparse attention with an index."""
