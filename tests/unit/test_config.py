"""Every check of the config dataclasses: the error names the field, the value and what would fit."""

import dataclasses
import itertools

import pytest

from moejax.config.data import DataConfig, SourceConfig
from moejax.config.errors import ConfigError
from moejax.config.memory import MemoryConfig
from moejax.config.mesh import AXES, BUILT, MeshConfig, ProcessConfig
from moejax.config.mixers import GDNConfig, GQAConfig, IndexerConfig, KDAConfig, MLAConfig, RopeConfig
from moejax.config.model import ActivationConfig, LayerKind, ModelConfig, PrecisionConfig, ResidualConfig, plan_layers
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.config.run import RunConfig, layer_plan, resolve
from moejax.config.training import CheckpointConfig, GroupConfig, LossConfig, ObserveConfig, OptimConfig, TrainConfig

BIASED = RouterConfig(correction_bias=True)
DSA = ModelConfig(mixers=("dsa",), mla=MLAConfig(q_lora_rank=16))
WRONG = [
    (lambda: SourceConfig(kind="text"), ["data.sources", "kind='text'", "path=''"]),
    (lambda: SourceConfig(path="a.txt"), ["data.sources", "kind='stdlib'", "path='a.txt'"]),
    (lambda: SourceConfig(weight=0.0), ["data.sources", "weight=0.0", "above 0"]),
    (lambda: DataConfig(sources=()), ["data.sources", "at least one"]),
    (lambda: DataConfig(seq_len=1), ["data.seq_len=1", "at least 2"]),
    (lambda: DataConfig(batch_size=0), ["data.batch_size=0", "at least 1"]),
    (lambda: DataConfig(pack_rows=0), ["data.pack_rows=0", "at least 1"]),
    (lambda: DataConfig(heldout_percent=51), ["data.heldout_percent=51", "between 1 and 50"]),
    (lambda: MeshConfig(fsdp=0), ["mesh.fsdp=0", "at least 1", "-1"]),
    (lambda: MeshConfig(expert=-2), ["mesh.expert=-2", "at least 1", "-1"]),
    (lambda: MeshConfig(simulate_devices=-1), ["mesh.simulate_devices=-1", "at least 0"]),
    (lambda: ProcessConfig(coordinator="a:1"), ["processes.coordinator='a:1'", "num_processes=0", "all three or none"]),
    (lambda: ProcessConfig(coordinator="a:1", num_processes=2, process_id=2), ["processes.process_id=2", "processes.num_processes=2"]),
    (lambda: ProcessConfig(timeout_s=9), ["processes.timeout_s=9", "at least 10"]),
    (lambda: RopeConfig(theta=0.0), ["rope.theta=0.0", "above 0"]),
    (lambda: RopeConfig(yarn_factor=0.5), ["rope.yarn_factor=0.5", "at least 1"]),
    (lambda: GQAConfig(num_kv_heads=3), ["gqa.num_kv_heads=3", "gqa.num_heads=4"]),
    (lambda: GQAConfig(rotary_dim=7), ["gqa.rotary_dim=7", "even", "gqa.head_dim=64"]),
    (lambda: IndexerConfig(pool=3), ["indexer.pool=3", "indexer.topk=256"]),
    (lambda: IndexerConfig(rotary_dim=34), ["indexer.rotary_dim=34", "indexer.head_dim=32"]),
    (lambda: GDNConfig(num_key_heads=3), ["gdn.num_key_heads=3", "gdn.num_heads=4"]),
    (lambda: KDAConfig(lower_bound=-6.0), ["kda.lower_bound=-6.0", "[-5, 0)"]),
    (lambda: KDAConfig(num_key_heads=3), ["kda.num_key_heads=3", "kda.num_heads=4"]),
    (lambda: RouterConfig(groups_kept=2), ["moe.router.groups_kept=2", "moe.router.num_groups=1"]),
    (lambda: MoEConfig(experts_per_token=17), ["moe.experts_per_token=17", "moe.num_experts=16"]),
    (lambda: MoEConfig(capacity_factor=-1.0), ["moe.capacity_factor=-1.0", "at least 0 (0: dropless)"]),
    (lambda: MoEConfig(router=RouterConfig(num_groups=3)), ["moe.router.num_groups=3", "moe.num_experts=16"]),
    (lambda: MoEConfig(router=RouterConfig(num_groups=8)), ["moe.experts_per_token=4", "2 experts", "moe.router.groups_kept=1"]),
    (
        lambda: MoEConfig(experts_per_token=1, router=RouterConfig(num_groups=16)),
        ["moe.router.num_groups=16", "1 experts", "moe.router.group_top=2"],
    ),
    (lambda: RouterConfig(topology_near=0.2, topology_far=0.1), ["moe.router.topology_far=0.1", "moe.router.topology_near=0.2"]),
    (lambda: RouterConfig(topology_far=1.0), ["moe.router.topology_far=1.0", "and 1"]),
    (lambda: RouterConfig(overload_threshold=0.5, overload_strength=1.0), ["moe.router.overload_threshold=0.5", "at least 1"]),
    (lambda: RouterConfig(overload_strength=-1.0), ["moe.router.overload_strength=-1.0", "0: off"]),
    (
        lambda: RouterConfig(score="softmax_chosen", correction_bias=True),
        ["moe.router.correction_bias=True", "'softmax_chosen'", "score='softmax'"],
    ),
    (lambda: ResidualConfig(block_size=0), ["residual.block_size=0", "at least 1"]),
    (lambda: ResidualConfig(num_streams=0), ["residual.num_streams=0", "at least 1"]),
    (lambda: ModelConfig(mixers=("gqa", "rwkv")), ["model.mixers", "rwkv", "gqa, mla, dsa, dsa_shared, gdn, kda"]),
    (lambda: ModelConfig(feed_forwards=()), ["model.feed_forwards", "no entry", "dense, moe"]),
    (lambda: ModelConfig(mixers=("gqa",) * 5), ["model.mixers", "5 layers", "model.num_layers=4"]),
    (lambda: ModelConfig(num_dense_layers=5), ["model.num_dense_layers=5", "model.num_layers=4"]),
    (lambda: ModelConfig(mixers=("dsa_shared", "dsa")), ["model.mixers", "dsa_shared", "before it"]),
    (lambda: ModelConfig(mixers=("dsa",)), ["model.mla.q_lora_rank=0", "above 0"]),
    (lambda: ModelConfig(mixers=("gqa",), gdn=GDNConfig(key_dim=8)), ["model.gdn", "no layer uses it", "model.mixers=('gqa',)"]),
    (lambda: ModelConfig(feed_forwards=("dense",), moe=MoEConfig(hidden=8)), ["model.moe", "model.feed_forwards=('dense',)"]),
    (lambda: GroupConfig(pattern="x", lr_scale=-1.0), ["optim.groups", "lr_scale=-1.0", "at least 0 (0: frozen)"]),
    (lambda: OptimConfig(learning_rate=-1.0), ["optim.learning_rate=-1.0", "at least 0"]),
    (lambda: OptimConfig(beta2=1.0), ["beta2=1.0", "[0, 1)"]),
    (lambda: OptimConfig(clip_norm=-1.0), ["optim.clip_norm=-1.0", "0: no clipping"]),
    (lambda: OptimConfig(decay_fraction=0.0), ["optim.decay_fraction=0.0", "(0, 1]"]),
    (lambda: OptimConfig(final_fraction=2.0), ["optim.final_fraction=2.0", "[0, 1]"]),
    (lambda: LossConfig(chunk_tokens=-1), ["losses.chunk_tokens=-1", "at least 0", "0: chosen"]),
    (lambda: LossConfig(chunk_vocab=-1), ["losses.chunk_vocab=-1", "at least 0", "0: chosen"]),
    (lambda: ModelConfig(logit_cap=-30.0), ["model.logit_cap=-30.0", "at least 0", "0: none"]),
    (lambda: TrainConfig(steps=0), ["train.steps=0", "at least 1"]),
    (lambda: TrainConfig(accumulation=0), ["train.accumulation=0", "at least 1"]),
    (lambda: TrainConfig(log_every=0), ["train.log_every=0", "at least 1"]),
    (lambda: MemoryConfig(budget_gb=1.0), ["memory.budget_gb=1.0", "memory.preset is 'fast'"]),
    (lambda: MemoryConfig(preset="auto"), ["memory.budget_gb=0.0", "above 0", "memory.preset='auto'"]),
    (lambda: MemoryConfig(offload=("quary",)), ["memory.offload names 'quary'", "legal are layer_input, "]),
    (lambda: MemoryConfig(keep=("query",), offload=("query",)), ["memory.offload and memory.keep both name 'query'"]),
    (lambda: MemoryConfig(keep=("query",)), ["memory.keep=('query',) would be ignored", "memory.preset is 'fast', which keeps every name"]),
    (lambda: MemoryConfig(recompute=("layer_input",)), ["memory.recompute names 'layer_input'", "nothing is left", "offload fits"]),
    (lambda: MemoryConfig(recompute=("dispatch_plan",)), ["memory.recompute names 'dispatch_plan'", "ties", "keep or offload fits"]),
    (lambda: CheckpointConfig(every=-1), ["checkpoint.every=-1", "at least 0"]),
    (lambda: CheckpointConfig(keep=0), ["checkpoint.keep=0", "at least 1"]),
    (lambda: ObserveConfig(profile="13:10"), ["observe.profile='13:10'", "first:last", "10:13"]),
    (lambda: ObserveConfig(profile="ten"), ["observe.profile='ten'", "first:last"]),
    (lambda: RunConfig(name=" "), ["name=' '", "out_dir/name"]),
    (lambda: GQAConfig(head_dim=7), ["gqa.head_dim=7", "an even one fits", "gqa.rope.kind='none'"]),
    (lambda: MLAConfig(rope_dim=15), ["mla.rope_dim=15", "an even one fits", "mla.rope.kind='none'"]),
    (lambda: MLAConfig(nope_dim=0, rope_dim=0), ["mla.nope_dim=0", "mla.rope_dim=0", "at least 1"]),
    (lambda: IndexerConfig(rotary_dim=7), ["indexer.rotary_dim=7", "even"]),
    (
        lambda: IndexerConfig(rotary_dim=8, rope=RopeConfig(kind="none")),
        ["indexer.rotary_dim=8", "ignored", "indexer.rope.kind='none'", "0 fits"],
    ),
    (lambda: GroupConfig(pattern="x", weight_decay=-0.5), ["optim.groups", "weight_decay=-0.5", "at least 0, or -1"]),
    *(
        (
            lambda params=params, compute=compute: PrecisionConfig(params=params, compute=compute),
            [f"params='{params}'", f"params='{compute}' fits"],
        )
        for params, compute in (("bfloat16", "float32"), ("bfloat16", "float64"), ("float32", "float64"))
    ),
    *(
        (
            lambda mixer=mixer, gqa=gqa: ModelConfig(mixers=("dsa", mixer), gqa=GQAConfig(**gqa), indexer=IndexerConfig(base="gqa")),
            [f"model.gqa.{name}={value}", "Leave it out, or set model.indexer.base='mla'"],
        )
        for mixer in ("dsa", "dsa_shared", "gqa")
        for gqa in ({"window": 16}, {"sinks": True})
        for name, value in gqa.items()
    ),
]
SMALLEST = {  # smallest value that fits, by config, in what messages call it
    (GQAConfig, "gqa"): {"num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "window": 0},
    (MLAConfig, "mla"): {"num_heads": 1, "q_lora_rank": 0, "kv_lora_rank": 1, "nope_dim": 0, "rope_dim": 0, "value_dim": 1},
    (IndexerConfig, "indexer"): {"num_heads": 1, "head_dim": 1, "topk": 1, "pool": 1},
    (GDNConfig, "gdn"): {"num_heads": 1, "num_key_heads": 1, "key_dim": 1, "value_dim": 1},
    (KDAConfig, "kda"): {"num_heads": 1, "num_key_heads": 0, "key_dim": 1, "value_dim": 1},
    (RouterConfig, "moe.router"): {"group_top": 1, "topology_near": 0, "topology_anneal_steps": 0},
    (MoEConfig, "moe"): {"num_experts": 1, "hidden": 1, "shared_hidden": 0, "latent_width": 0},
    (ModelConfig, "model"): {"vocab_size": 1, "width": 1, "num_layers": 1, "dense_hidden": 1, "init_std": 0},
    (OptimConfig, "optim"): {"weight_decay": 0, "warmup_steps": 0, "muon_learning_rate": 0},
    (MemoryConfig, "memory"): {"budget_gb": 0},
    (TrainConfig, "train"): {"eval_every": 0, "eval_batches": 1, "max_skipped": 0},
    (ObserveConfig, "observe"): {"sample_tokens": 0, "peak_tflops": 0},
}
ABOVE_ZERO = [
    (RopeConfig, "rope", "yarn_beta_slow"),
    (MLAConfig, "mla", "latent_norm_eps"),
    (ActivationConfig, "activation", "beta"),
    (ResidualConfig, "residual", "mhc_eps"),
    (ModelConfig, "model", "norm_eps"),
    (OptimConfig, "optim", "eps"),
    (CheckpointConfig, "checkpoint", "term_timeout_s"),
    *((MemoryConfig, "memory", name) for name in ("compute_tflops", "memory_gb_per_s", "copy_gb_per_s", "exchange_gb_per_s")),
]
IGNORED = [  # what is made with them, fields that are not used, and what fields would be
    (RopeConfig, {"kind": "none"}, {"theta": 5.0}, {"kind": "half"}),
    (RopeConfig, {}, {"yarn_original_length": 8}, {"yarn_factor": 2.0}),
    (GQAConfig, {"rope": RopeConfig(kind="none")}, {"rotary_dim": 8}, {"rope": RopeConfig()}),
    (MLAConfig, {"rope_dim": 0}, {"rope": RopeConfig(theta=5.0)}, {"rope_dim": 2}),
    (IndexerConfig, {}, {"rope": RopeConfig(theta=5.0)}, {"rotary_dim": 2}),
    (KDAConfig, {"decay": "softplus"}, {"lower_bound": -4.0}, {"decay": "bounded"}),
    (ActivationConfig, {}, {"limit": 5.0}, {"kind": "swiglu_clamped"}),
    (ActivationConfig, {"kind": "swiglu_clamped"}, {"linear_beta": 5.0}, {"kind": "situ"}),
    (RouterConfig, {}, {"group_top": 3}, {"num_groups": 2}),
    (RouterConfig, {"score": "softmax_chosen"}, {"renormalise": False}, {"score": "softmax"}),
    (RouterConfig, {}, {"overload_threshold": 2.0}, {"overload_strength": 1.0}),
    (RouterConfig, {}, {"topology_anneal_steps": 5}, {"topology_far": 0.1}),
    (MoEConfig, {}, {"shared_gate": True}, {"shared_hidden": 8}),
    (MoEConfig, {}, {"latent_norm": False}, {"latent_width": 8}),
    (ResidualConfig, {}, {"num_streams": 2}, {"kind": "mhc"}),
    (ResidualConfig, {"kind": "mhc"}, {"block_size": 2}, {"kind": "block_attnres"}),
    (ModelConfig, {}, {"dense_hidden": 8}, {"num_dense_layers": 1}),
    (SourceConfig, {}, {"field": "body"}, {"kind": "jsonl", "path": "a"}),
    (OptimConfig, {}, {"muon_learning_rate": 0.5}, {"kind": "muon"}),
    (OptimConfig, {"kind": "sgd"}, {"beta2": 0.5}, {"kind": "muon"}),
    (OptimConfig, {}, {"decay_fraction": 0.5}, {"schedule": "wsd"}),
    (OptimConfig, {"schedule": "constant"}, {"final_fraction": 0.5}, {"schedule": "wsd"}),
]
UNRESOLVED = [
    (RunConfig(name="a", mesh=MeshConfig(data=-1)), 8, ["mesh.data and mesh.fsdp are -1", "at most one"]),
    (RunConfig(name="a", mesh=MeshConfig(expert=3)), 8, ["expert=3", "multiple of 3 devices", "there are 8"]),
    (
        RunConfig(name="a", mesh=MeshConfig(fsdp=2, expert=2)),
        8,
        ["fsdp=2 x expert=2", "needs 4 devices", "there are 8", "mesh.simulate_devices"],
    ),
    (RunConfig(name="a", train=TrainConfig(accumulation=3)), 8, ["train.accumulation=3", "data.batch_size=16"]),
    (RunConfig(name="a", data=DataConfig(batch_size=12)), 8, ["data.batch_size=12", "8 token shards", "a multiple of 8 fits"]),
    (
        RunConfig(name="a", mesh=MeshConfig(expert=3), data=DataConfig(batch_size=6)),
        6,
        ["mesh.expert=3", "model.moe.num_experts=16", "[1, 2, 4, 8, 16] would fit"],
    ),
    (
        RunConfig(name="a", mesh=MeshConfig(expert=2), model=ModelConfig(feed_forwards=("dense",))),
        8,
        ["mesh.expert=2", "no moe layer", "mesh.fsdp"],
    ),
    (
        RunConfig(name="a", losses=LossConfig(balance="switch"), model=ModelConfig(feed_forwards=("dense",))),
        8,
        ["losses.balance='switch'", "no moe layer"],
    ),
    (RunConfig(name="a", losses=LossConfig(bias_update="sign")), 8, ["losses.bias_update='sign'", "model.moe.router.correction_bias=True"]),
    (RunConfig(name="a", losses=LossConfig(index="sparse")), 8, ["losses.index='sparse'", "no dsa layer"]),
    (RunConfig(name="a", model=ModelConfig(vocab_size=255)), 8, ["model.vocab_size=255", "at least 256"]),
    (
        RunConfig(name="a", mesh=MeshConfig(fsdp=2, expert=4), model=ModelConfig(width=20)),
        8,
        ["model.width=20", "mesh.fsdp=2 x mesh.expert=4 = 8 devices", "16 or 24 would fit"],
    ),
    (RunConfig(name="a", mesh=MeshConfig(fsdp=8), model=ModelConfig(width=4)), 8, ["model.width=4", "mesh.fsdp=8", "; 8 would fit"]),
    (
        RunConfig(name="a", mesh=MeshConfig(fsdp=4, expert=2), model=ModelConfig(moe=MoEConfig(latent_width=30))),
        8,
        ["model.moe.latent_width=30", "mesh.fsdp=4 devices", "28 or 32 would fit"],
    ),
    *(
        (RunConfig(name="a", losses=LossConfig(**{name: -0.5})), 8, [f"losses.{name}=-0.5", "at least 0"])
        for name in ("z_coef", "balance_coef", "router_z_coef", "bias_rate", "index_coef")
    ),
    (
        RunConfig(name="a", losses=LossConfig(balance_coef=0.5)),
        8,
        ["losses.balance_coef=0.5", "ignored", "losses.balance is 'none'", "0.01"],
    ),
    (RunConfig(name="a", losses=LossConfig(index_coef=0.5)), 8, ["losses.index_coef=0.5", "ignored", "losses.index is 'none'"]),
    (RunConfig(name="a", losses=LossConfig(bias_rate=0.5)), 8, ["losses.bias_rate=0.5", "ignored", "losses.bias_update is 'none'"]),
    (
        RunConfig(name="a", losses=LossConfig(router_z_coef=0.5), model=ModelConfig(feed_forwards=("dense",))),
        8,
        ["losses.router_z_coef=0.5", "no moe layer", "0 fits"],
    ),
    (RunConfig(name="a", model=DSA), 8, ["losses.index='none'", "mixer/indexer/q_RJC", "losses.index='sparse'", "'^(?!.*indexer)'"]),
    (
        RunConfig(name="a", model=DSA, train=TrainConfig(train_only="mixer/.*weight_DJ")),
        8,
        ["losses.index='none'", "unit/0/mixer/indexer/weight_DJ", "train.train_only"],
    ),
    (
        RunConfig(name="a", model=dataclasses.replace(DSA, indexer=IndexerConfig(pool=4))),
        8,
        ["losses.index='none'", "no index loss is built for model.indexer.pool=4", "freeze it", "train.train_only"],
    ),
    (
        RunConfig(name="a", model=DSA, losses=LossConfig(index="sparse", index_coef=0.0)),
        8,
        ["losses.index='sparse'", "losses.index_coef=0.0", "freeze it"],
    ),
    (RunConfig(name="a", model=DSA, train=TrainConfig(train_only="(")), 8, ["train.train_only='('", "regular expression"]),
    (RunConfig(name="a", train=TrainConfig(carry_keys=4)), 8, ["train.carry_keys=4", "ignored", "data.windows is False"]),
    (
        RunConfig(name="a", train=TrainConfig(frozen_cache_mib=4, accumulation=2)),
        8,
        ["train.frozen_cache_mib=4", "train.accumulation=2", "1 fits"],
    ),
    (
        RunConfig(name="a", train=TrainConfig(frozen_cache_mib=4, train_only="embed")),
        8,
        ["train.frozen_cache_mib=4", "embed/weight_VD learns", "train.train_only='embed'", "must leave out"],
    ),
    (RunConfig(name="a", train=TrainConfig(frozen_cache_mib=4, debug=True)), 8, ["frozen_cache_mib=4", "train.debug=True"]),
    (RunConfig(name="a", data=DataConfig(windows=True), train=TrainConfig(frozen_cache_mib=4)), 8, ["frozen_cache_mib=4", "data.windows"]),
    (
        RunConfig(name="a", data=DataConfig(windows=True), train=TrainConfig(accumulation=2)),
        8,
        ["data.windows", "train.accumulation=2", "1 fits"],
    ),
    (
        RunConfig(
            name="a",
            data=DataConfig(windows=True),
            model=dataclasses.replace(DSA, indexer=IndexerConfig(pool=4)),
            train=TrainConfig(train_only="feed_forward"),
        ),
        8,
        ["data.windows", "model.indexer.pool=4", "1 fits"],
    ),
    (
        RunConfig(name="a", data=DataConfig(windows=True), model=ModelConfig(mixers=("kda",)), train=TrainConfig(carry_keys=4)),
        8,
        ["train.carry_keys=4", "no layer", "['kda']", "0 fits"],
    ),
]
FREE, OFF = GroupConfig(pattern="indexer"), GroupConfig(pattern="mixer", lr_scale=0)
TAUGHT_OR_FROZEN = [
    {"losses": LossConfig(index="dense"), "train": TrainConfig(train_only="indexer")},
    {"train": TrainConfig(train_only="^(?!.*indexer)")},
    {"train": TrainConfig(train_only="feed_forward")},
    {"optim": OptimConfig(groups=(OFF,))},
    {"optim": OptimConfig(groups=(OFF, FREE))},
]


@pytest.mark.parametrize(("make", "words"), WRONG, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_wrong_config_names_the_field_the_value_and_what_would_fit(make, words):
    with pytest.raises(ConfigError) as error:
        make()
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(("config", "num_devices", "words"), UNRESOLVED, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_parts_that_do_not_fit_together_are_named(config, num_devices, words):
    with pytest.raises(ConfigError) as error:
        resolve(config, num_devices)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis not in BUILT])
def test_an_axis_that_is_not_built_is_refused_above_one(axis):
    with pytest.raises(ConfigError, match=rf"mesh\.{axis}=2: this axis is not built yet, only 1 fits\. Built are data, fsdp, expert"):
        MeshConfig(**{axis: 2})


@pytest.mark.parametrize(
    ("kind", "group", "name", "low"), [(*key, name, low) for key, lows in SMALLEST.items() for name, low in lows.items()]
)
def test_sizes_have_a_smallest_value(kind, group, name, low):
    with pytest.raises(ConfigError, match=rf"^{group}\.{name}={low - 1} must be at least {low}"):
        kind(**{name: low - 1})


@pytest.mark.parametrize(("kind", "group", "name"), ABOVE_ZERO)
def test_what_must_not_be_zero_is_refused_at_zero(kind, group, name):
    with pytest.raises(ConfigError, match=rf"^{group}\.{name}=0.* must be above 0"):
        kind(**{name: 0})


@pytest.mark.parametrize(("kind", "without", "field", "user"), IGNORED, ids=lambda value: value.__name__ if isinstance(value, type) else "")
def test_a_field_that_nothing_reads_is_refused_unless_it_is_as_it_was(kind, without, field, user):
    (name,) = field
    with pytest.raises(ConfigError, match=rf"{name}=.* would be ignored: .*(none|no |is |rotates|switches).*Leave it out"):
        kind(**without | field)
    assert getattr(kind(**without | field | user), name) == field[name]
    kind(**without)


@pytest.mark.parametrize("parts", TAUGHT_OR_FROZEN, ids=range(len(TAUGHT_OR_FROZEN)))
def test_an_indexer_is_taught_by_its_loss_or_frozen(parts):
    resolve(RunConfig(name="a", model=DSA, **parts), 8)
    with pytest.raises(ConfigError, match="is not frozen"):
        resolve(RunConfig(name="a", model=DSA, optim=OptimConfig(groups=(FREE, OFF))), 8)


def test_no_size_is_open_in_a_plan():
    plan = resolve(RunConfig(name="a", mesh=MeshConfig(expert=4), data=DataConfig(batch_size=16), train=TrainConfig(accumulation=2)), 8)
    assert plan.config.mesh.sizes() == {"pipe": 1, "data": 1, "fsdp": 2, "expert": 4, "context": 1, "tensor": 1}
    assert plan.rows_per_device == 1


def test_what_is_right_is_accepted():
    model = dataclasses.replace(DSA, moe=MoEConfig(router=BIASED))
    config = RunConfig(name="a", model=model, losses=LossConfig(index="sparse", bias_update="quantile", balance="global"))
    assert resolve(config, 1).config.mesh.fsdp == 1
    assert ObserveConfig(profile="10:13").profile_steps() == (10, 13)
    assert ObserveConfig().profile_steps() is None


@pytest.mark.parametrize(("head", "unit", "repeats", "tail"), list(itertools.product((0, 1, 2), (1, 4), (2, 3), (0, 1))))
def test_a_layer_plan_names_every_layer_once_and_in_order(head, unit, repeats, tail):
    first, last = LayerKind(mixer="gqa", feed_forward="dense"), LayerKind(mixer="mla", feed_forward="moe")
    body = tuple(LayerKind(mixer="dsa" if place == unit - 1 else "kda", feed_forward="moe") for place in range(unit))
    kinds = (first,) * head + body * repeats + (last,) * tail
    plan = plan_layers(kinds)
    sections = {"head": plan.head, "unit": plan.unit, "tail": plan.tail}
    places = [plan.place(layer) for layer in range(len(kinds))]
    assert [sections[section][place] for section, place, _ in places] == list(kinds)
    assert len(set(places)) == len(kinds)
    assert len(plan.head) + len(plan.unit) + len(plan.tail) <= head + unit + tail


def test_a_block_of_attention_residuals_is_never_cut():
    plan = layer_plan(ModelConfig(num_layers=10, residual=ResidualConfig(kind="block_attnres", block_size=2)))
    assert len(plan.head) % 2 == 0 and len(plan.unit) % 2 == 0 and plan.num_units == 5
