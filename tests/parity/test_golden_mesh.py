"""The same on eight devices: two shards of the weights by four of the experts."""

import golden_models
import pytest
from golden_models import FAMILIES

EIGHT = {"fsdp": 2, "expert": 4}


def test_float32_of_one_family_equals_the_golden_values():
    golden_models.check("deepseek_v32", "float32", EIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_the_golden_values(family, request):
    if family == "kimi_k3":  # without LLVM's passes its worst gradient is off by 2.5e-3, with them by less than 2e-3
        request.getfixturevalue("optimised")
    golden_models.check(family, "float32", EIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_equals_the_golden_values(family):
    golden_models.check(family, "float64", EIGHT)
