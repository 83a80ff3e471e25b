"""Which weights of real models decay."""

import jax
import tiny

from moejax.config.mixers import GQAConfig, IndexerConfig, KDAConfig, MLAConfig
from moejax.config.model import ResidualConfig
from moejax.config.training import GroupConfig, OptimConfig
from moejax.model import language_model
from moejax.optim.groups import GATES, assign, path_of

GATED_MLA = MLAConfig(num_heads=2, q_lora_rank=8, kv_lora_rank=8, nope_dim=8, rope_dim=4, value_dim=8, output_gate=True)
MODELS = (
    tiny.model("kda", "gdn", "mla", moe=tiny.moe(shared_gate=True, latent_width=8), num_dense_layers=1, dense_hidden=8),
    tiny.model("kda", "gqa", kda=KDAConfig(num_heads=2, key_dim=8, value_dim=8, full_rank_gate=True), gqa=GQAConfig(output_gate=True)),
    tiny.model("dsa", mla=GATED_MLA, indexer=IndexerConfig(topk=4, pool=2), residual=ResidualConfig(kind="mhc", num_streams=2)),
    tiny.model("dsa", residual=ResidualConfig(kind="block_attnres", block_size=1)),
)
DECAYED = {
    *("weight_VD", "weight_DV"),  # embedding and output projection
    *("q_DHX", "k_DGC", "v_DGC", "out_HCD"),  # GQA
    *("q_DHC", "q_down_DR", "q_up_RHC", "kv_down_DR", "kv_up_RHX", "out_HMD"),  # MLA
    *("q_DGC", "v_DHM", "qkvz_DGX"),  # delta rules
    *("q_RJC", "k_DC", "weight_DJ"),  # indexer
    *("weight_DE", "gate_DF", "up_DF", "down_FD", "gate_EDF", "up_EDF", "down_EFD", "latent_down_DZ", "latent_up_ZD"),  # feed-forwards
}


def rules(config: OptimConfig) -> dict:
    """Rule of each weight of MODELS, by the model's place and the path."""
    trees = [assign(config, language_model.shapes(model)) for model in MODELS]
    return {(i, path_of(keys)): rule for i, tree in enumerate(trees) for keys, rule in jax.tree_util.tree_leaves_with_path(tree)}


def test_matrices_decay_and_the_projections_that_make_gates_do_not():
    of_weight = rules(OptimConfig(weight_decay=0.1))
    names = lambda decay: {path.rsplit("/", 1)[-1] for (_, path), rule in of_weight.items() if rule.weight_decay == decay}
    assert names(0.1) == DECAYED
    assert names(0.0) >= GATES | {"shared_gate_D1", "A_log_H", "dt_bias_H", "dt_bias_HC", "scale_D", "bias_E", "query_D", "base_X"}
    assert not names(0.0) & DECAYED and len(of_weight) == sum(rule.weight_decay in (0.0, 0.1) for rule in of_weight.values())


def test_a_group_may_still_name_a_decay_for_gates():
    config = OptimConfig(groups=(GroupConfig(pattern="beta_DH", weight_decay=0.3),))
    found = [
        rule.weight_decay
        for keys, rule in jax.tree_util.tree_leaves_with_path(assign(config, language_model.shapes(MODELS[0])))
        if path_of(keys).endswith("beta_DH")
    ]
    assert found == [0.3]
