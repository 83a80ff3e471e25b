"""Feed-forward layers: dense, and mixture of experts with shared experts and an optional latent (Kimi K3, Stable LatentMoE)."""

import functools

import jax
from flax import nnx
from moejax_kernels import gated_activation, grouped_mlp

from moejax.config.model import ActivationConfig, ModelConfig
from moejax.memory.names import named
from moejax.model.context import Context
from moejax.model.norms import RMSNorm
from moejax.model.weights import Maker
from moejax.moe.expert_parallel import expert_parallel
from moejax.moe.layer_routing import choose_layer, count_together, weigh_layer
from moejax.moe.overlap import Beside
from moejax.moe.statistics import routing_statistics
from moejax.moe.topology import Topology, contiguous_homes
from moejax.parallel.axes import spec
from moejax.parallel.islands import per_rows
from moejax.parallel.projection import float_inside, project

DENSE_AXES = {"gate_DF": ("embed", "mlp"), "up_DF": ("embed", "mlp"), "down_FD": ("mlp", "embed")}
EXPERT_AXES = {"gate_EDF": ("expert", "embed", "mlp"), "up_EDF": ("expert", "embed", "mlp"), "down_EFD": ("expert", "mlp", "embed")}


def activation_options(config: ActivationConfig) -> dict:
    """The model's gated activation, as the kernels take it."""
    return {"kind": config.kind, "limit": config.limit, "beta": config.beta, "linear_beta": config.linear_beta or None}


class Dense(nnx.Module):
    """One gated MLP; also the shared expert."""

    def __init__(self, config: ModelConfig, hidden: int, *, hidden_name: str = "dense_hidden", rngs: nnx.Rngs):
        self.activation, self.hidden_name = config.activation, hidden_name
        make, width = Maker(config, rngs), config.width
        self.gate_DF = make.linear(DENSE_AXES["gate_DF"], width, hidden, fan_in=width)
        self.up_DF = make.linear(DENSE_AXES["up_DF"], width, hidden, fan_in=width)
        self.down_FD = make.linear(DENSE_AXES["down_FD"], hidden, width, fan_in=hidden)

    def __call__(self, x_BLD, context: Context | None = None):
        weights = {name: getattr(self, name)[...] for name in DENSE_AXES}
        return self._leave({}, weights, self._enter({}, weights, x_BLD)), {}

    def beside(self, x_BLD) -> Beside:
        """The same, to be computed beside the exchanges of `expert_parallel`."""
        placed = {name: spec(axes) for name, axes in DENSE_AXES.items()}
        params = {name: (getattr(self, name)[...], placed[name]) for name in DENSE_AXES}
        return Beside(x_BLD, params, functools.partial(self._enter, placed), functools.partial(self._leave, placed))

    def _enter(self, placed, weights, x_BLD):
        """Gate and up; `placed` as in `project`, by name."""
        return tuple(project("bld,df->blf", x_BLD, weights[name], placed=placed.get(name)) for name in ("gate_DF", "up_DF"))

    def _leave(self, placed, weights, gate_up):
        """From gate and up to the output."""
        activate = functools.partial(gated_activation, **activation_options(self.activation))

        @jax.checkpoint  # the activation's result is cheaper to redo than to store
        def down(gate_BLF, up_BLF, w_FD):
            h_BLF = per_rows(activate, gate_BLF, up_BLF)  # XLA cannot split a GPU kernel: it would gather the rows of all devices
            return project("blf,fd->bld", h_BLF, w_FD, placed=placed.get("down_FD"))

        return down(*named(gate_up, self.hidden_name), weights["down_FD"])  # named behind the barriers of `overlap.travel`


class Experts(nnx.Module):
    """Gated MLPs of the routed experts."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        moe = config.moe
        make, width = Maker(config, rngs), moe.latent_width or config.width
        self.gate_EDF = make.linear(EXPERT_AXES["gate_EDF"], moe.num_experts, width, moe.hidden, fan_in=width)
        self.up_EDF = make.linear(EXPERT_AXES["up_EDF"], moe.num_experts, width, moe.hidden, fan_in=width)
        self.down_EFD = make.linear(EXPERT_AXES["down_EFD"], moe.num_experts, moe.hidden, width, fan_in=moe.hidden)

    def with_specs(self) -> dict:
        """Weights and where their dims lie."""
        return {name: (getattr(self, name)[...], spec(axes)) for name, axes in EXPERT_AXES.items()}


class Router(nnx.Module):
    """Weights of the choice of experts."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        make = Maker(config, rngs)
        self.weight_DE = make.linear(("embed", None), config.width, config.moe.num_experts, fan_in=config.width)
        if config.moe.router.correction_bias:
            self.bias_E = make.constant(0.0, (None,), config.moe.num_experts)
        if config.moe.router.logit_bias:
            self.logit_bias_E = make.constant(0.0, (None,), config.moe.num_experts)

    def __call__(self, x_BLD):
        """Logits in float32, and the correction bias or None."""
        bias_E = self.bias_E[...] if hasattr(self, "bias_E") else None
        logits_BLE = project("bld,de->ble", float_inside(x_BLD), self.weight_DE[...])
        if hasattr(self, "logit_bias_E"):
            logits_BLE = logits_BLE + self.logit_bias_E[...].astype(logits_BLE.dtype)
        return named(logits_BLE, "router_logits"), bias_E


class MixtureOfExperts(nnx.Module):
    """Routed experts, beside an optional shared expert."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config, self.activation = config.moe, config.activation
        make, width, moe = Maker(config, rngs), config.width, config.moe
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        if moe.shared_hidden:
            self.shared = Dense(config, moe.shared_hidden, hidden_name="shared_hidden", rngs=rngs)
            if moe.shared_gate:
                self.shared_gate_D1 = make.linear(("embed", None), width, 1, fan_in=width)
        if moe.latent_width:
            self.latent_down_DZ = make.linear(("embed", None), width, moe.latent_width, fan_in=width)
            self.latent_up_ZD = make.linear((None, "embed"), moe.latent_width, width, fan_in=moe.latent_width)
            if moe.latent_norm:
                self.latent_norm = RMSNorm(config, moe.latent_width, rngs=rngs, plain=True)

    def __call__(self, x_BLD, context: Context):
        moe, segments, switches = self.config, context.segments, context.switches
        control = context.control or {}
        logits_BLE, bias_E = self.router(x_BLD)
        choice, load_E, far = choose_layer(
            logits_BLE, bias_E, segments, experts_per_token=moe.experts_per_token, config=moe.router, topology=self._topology(control)
        )
        whole_load_E = control.get("global_load_E", far.get("counted_E", load_E))
        routing, soft = weigh_layer(choice, load_E, config=moe.router, constrain=switches.training, whole_load_E=whole_load_E)
        z_BLZ = project("bld,dz->blz", x_BLD, self.latent_down_DZ[...]) if moe.latent_width else x_BLD
        y_BLZ, shared_BLD, chain = expert_parallel(
            z_BLZ,
            routing.ids_BLK,
            routing.probs_BLK,
            self.experts.with_specs(),
            apply_experts=self._apply_experts,
            config=moe,
            control=control,
            beside=self.shared.beside(x_BLD) if moe.shared_hidden else None,
        )
        if moe.latent_width:
            y_BLZ = self.latent_norm(y_BLZ) if moe.latent_norm else y_BLZ
            y_BLZ = project("blz,zd->bld", y_BLZ, self.latent_up_ZD[...])
        statistics = routing_statistics(
            routing, bias_E, segments, kind=switches.balance, z=switches.router_z, histogram=switches.histogram, global_load_E=whole_load_E
        )
        if moe.copies.move and moe.node_size and switches.training:
            statistics["together_EE"] = count_together(routing.ids_BLK, moe.num_experts)
        return y_BLZ + self._gated(shared_BLD, x_BLD) if moe.shared_hidden else y_BLZ, {"load_E": load_E} | far | chain | soft | statistics

    def _apply_experts(self, weights, x_WD, sizes_x):
        options = activation_options(self.activation)
        return grouped_mlp(named(x_WD, "expert_rows"), weights["gate_EDF"], weights["up_EDF"], weights["down_EFD"], sizes_x, **options)

    def _topology(self, control: dict) -> Topology | None:
        """Distances, where the config names nodes."""
        moe, num_devices = self.config, jax.sharding.get_abstract_mesh().shape["expert"]
        if not moe.node_size:
            return None
        homes_E = contiguous_homes(moe.num_experts, num_devices)
        if "tables" in control:
            homes_E = control["tables"].position_E // (moe.num_experts // num_devices)
        return Topology(devices_per_node=moe.node_size, home_device_E=homes_E, factor=control.get("topology_factor"))

    def _gated(self, shared_BLD, x_BLD):
        if not self.config.shared_gate:
            return shared_BLD
        shared_BLD = named(shared_BLD, "shared_out")
        gate_BL1 = jax.nn.sigmoid(float_inside(project("bld,do->blo", x_BLD, self.shared_gate_D1[...])))
        return (float_inside(shared_BLD) * gate_BL1).astype(shared_BLD.dtype)
