"""`moejax plan`: the real train step of a config, compiled for GPUs that are not there."""

import pathlib

import pytest

from moejax.config.errors import ConfigError
from moejax.config.load import load_config
from moejax.plan.compiled import collectives, kernel_uses, launches
from moejax.plan.targets import TARGETS, parse
from moejax.plan.train_step import plan_step

pytestmark = pytest.mark.aot
CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "tiny_hybrid.py"


def test_the_main_job_compiles_for_eight_gpus():
    target, count = parse("h200x8")
    planned = plan_step(load_config(CONFIG, []), target, count)
    uses = kernel_uses(planned.lowered, target)
    assert uses and all(use.spilled_bytes == 0 for use in uses), uses
    assert launches(planned.compiled)["triton"] > 0
    assert collectives(planned.compiled)["all-to-all"] > 0  # rows go to their experts
    assert "target    8 x NVIDIA H200" in planned.report
    for title in ("mesh", "weights", "bytes", "kernels", "XLA flags", "launches", "traffic"):
        assert f"\n{title} " in planned.report, planned.report


def test_with_shared_prefixes_ops_run_on_the_kernels_that_they_have():
    wide = ["--model.kda.key_dim", "64", "--model.kda.value_dim", "64", "--model.num_layers", "4"]
    planned = plan_step(load_config(CONFIG, [*wide, "--data.share_prefixes"]), *parse("h200x8"))
    kernels = next(line for line in planned.report.splitlines() if line.startswith("kernels "))
    for chosen in ("kda triton_gpu", "causal_conv triton_gpu", "grouped_mlp triton_gpu"):
        assert chosen in kernels, kernels
    assert launches(planned.compiled)["triton"] > 0


def test_with_a_frozen_cache_the_step_that_is_compiled_is_the_one_that_starts_above_the_frozen_layers():
    flags = ["--model.num_layers", "2", "--model.mixers", "kda", "dsa", "--train.train_only", "^(head/1|final_norm|unembed)"]
    flags += ["--model.moe.capacity_factor", "0", "--losses.bias_update", "none"]
    whole, above = (plan_step(load_config(CONFIG, [*flags, *more]), *parse("h200x8")) for more in ([], ["--train.frozen_cache_mib", "64"]))
    assert "\nfrozen    head/0: " in above.report and "\nfrozen " not in whole.report
    assert launches(above.compiled)["triton"] < launches(whole.compiled)["triton"]


def test_a_target_that_there_is_not_is_named():
    with pytest.raises(ConfigError, match="--target='h300x8' must be one of a100, h100, h200, b200"):
        parse("h300x8")
    with pytest.raises(ConfigError, match="multiple of 8"):
        parse("h200x12")
    assert parse("h200x128") == (TARGETS["h200"], 128)
