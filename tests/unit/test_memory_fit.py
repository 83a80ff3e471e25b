"""What `auto` keeps, by hand; and choices that cannot be."""

import pytest

from moejax.config.errors import ConfigError
from moejax.config.memory import RESULTS, MemoryConfig
from moejax.memory.names import named
from moejax.memory.policy import Saved, by_preset, saved
from moejax.memory.results import Cost, Result, Total, fit

RATES = {"compute_tflops": 1.0, "memory_gb_per_s": 1e6, "copy_gb_per_s": 10.0, "exchange_gb_per_s": 5.0}
GB, TFLOP = 10**9, 10**12


def total(name: str, *, gb: int, tflop: float = 0.0, sent_gb: float = 0.0, layers: int = 2) -> Result:
    cost = Cost(result_bytes=gb * GB // layers, flops=tflop * TFLOP / layers, sent_bytes=sent_gb * GB / layers)
    return Result(name=name, maker="layer", layers=layers, cost=cost)


# GB; seconds to make it again; seconds of a copy at 10 GB/s; GB freed per second in the quicker way
FOUND = [
    total("layer_input", gb=2),  # 2; never; 0.2; 10 by copy
    total("dispatch_plan", gb=1),  # 1; never; stays
    total("query", gb=4, tflop=0.1),  # 4; 0.1; 0.4; 40
    total("attention", gb=3, tflop=3.0),  # 3; 3; 0.3; 10 by copy
    total("expert_rows", gb=6, tflop=0.1, sent_gb=2.0),  # 6; 0.1 + 0.4 of the exchange; 0.6; 12
    total("mixer_out", gb=2, tflop=0.15),  # 2; 0.15; 0.2; 13.3
]


def choices(budget_gb: float, *, beside_s: float = 1.0, **overrides):
    config = MemoryConfig(preset="auto", budget_gb=budget_gb, **RATES, **overrides)
    return fit(config, Total.of(FOUND, config), beside_s=beside_s)


def names(found: dict, choice: str) -> set[str]:
    return {name for name, chosen in found.items() if chosen == choice}


def test_all_stays_where_there_is_room_for_all():
    assert names(choices(18.0), "keep") == {result.name for result in FOUND}


def test_what_frees_most_bytes_per_second_leaves_first_in_its_quicker_way():
    assert names(choices(14.0), "recompute") == {"query"}
    found = choices(13.0)
    assert (names(found, "recompute"), names(found, "offload")) == ({"query", "mixer_out"}, set())
    found = choices(5.0)
    assert (names(found, "recompute"), names(found, "offload")) == ({"query", "mixer_out", "expert_rows"}, {"layer_input"})
    found = choices(1.0)
    assert (names(found, "keep"), names(found, "offload")) == ({"dispatch_plan"}, {"layer_input", "attention"})


def test_what_left_and_would_still_fit_comes_back():
    """7 GB over: query, mixer_out and expert_rows leave with 12; of the 5 GB of room mixer_out takes 2, and query's 4 are too many."""
    assert names(choices(11.0), "recompute") == {"query", "expert_rows"}


def test_a_result_without_bytes_stays():
    totals = Total.of([*FOUND, total("norm", gb=0)], MemoryConfig(**RATES))
    for budget_gb in (100.0, 15.0, 1.0):
        assert fit(MemoryConfig(preset="auto", budget_gb=budget_gb, **RATES), totals, beside_s=1.0)["norm"] == "keep"


def test_copies_that_do_not_fit_beside_the_forward_pass_are_not_made():
    found = choices(1.0, beside_s=0.25)  # 0.2 s of layer_input do, 0.3 s more of attention do not
    assert (names(found, "offload"), names(found, "keep")) == ({"layer_input"}, {"dispatch_plan"})


def test_what_the_config_names_is_as_it_says():
    found = choices(12.0, keep=("query",), offload=("attention",), recompute=("mixer_out",))
    assert (names(found, "offload"), names(found, "recompute")) == ({"attention"}, {"mixer_out", "expert_rows"})
    assert found["query"] == "keep"


def test_a_budget_that_nothing_fits_says_what_would():
    with pytest.raises(ConfigError, match=r"memory.budget_gb=0.5 is too little: what must stay on a device takes 1\b"):
        choices(0.5)
    with pytest.raises(ConfigError, match=r"takes 3\b.*train.accumulation"):
        choices(2.0, beside_s=0.0)  # no copy fits: layer inputs must stay


def test_presets_choose_for_every_name_and_fast_needs_no_policy():
    for preset in ("fast", "balanced", "lean"):
        config = MemoryConfig(preset=preset)
        found = by_preset(config)
        assert found.keys() == RESULTS.keys()
        assert (saved(config, found) is None) == (preset == "fast")
    assert saved(MemoryConfig(preset="lean"), by_preset(MemoryConfig(preset="lean"))) == Saved()
    config = MemoryConfig(offload=("attention",))
    assert saved(config, by_preset(config)) == Saved(tuple(name for name in RESULTS if name != "attention"), ("attention",))


def test_a_name_that_is_not_listed_cannot_be_put_on_a_result():
    with pytest.raises(ValueError, match="no result of a layer is called 'quary'"):
        named(1.0, "quary")
