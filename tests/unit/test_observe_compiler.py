"""What the compiler says: replicated tensors, and bytes per device; and what the doctor sees."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.observe import doctor
from moejax.observe.compile_log import ReplicationError, refuse_replication
from moejax.observe.memory import compiled_bytes, tree_bytes


def sharded(*spec):
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    return NamedSharding(mesh, P(*spec))


def compile_reshard(old, new):
    """A program that moves a tensor from one sharding to another."""

    def reshard(x_DF):
        with jax.named_scope("the_culprit"):
            return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(jnp.cos(x_DF), old), new)

    return jax.jit(reshard, in_shardings=old).lower(jax.ShapeDtypeStruct((16, 16), jnp.float32)).compile()


@pytest.mark.parametrize("time", ["first", "second"])  # a refused program must not slip through the compilation cache
def test_a_tensor_that_is_replicated_to_reshard_it_is_an_error(time, capfd):
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        with pytest.raises(ReplicationError, match=r"(?s)replicates 1 tensor.*f32\[8,8\].*'a'.*'c'.*the_culprit"), refuse_replication():
            compile_reshard(sharded("a", "b"), sharded(("a", "b", "c")))
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    assert "Involuntary full rematerialization" in capfd.readouterr().err  # still seen


def test_a_program_that_gathers_as_asked_passes(capfd):
    with refuse_replication():
        compile_reshard(sharded("a", "b"), sharded("a"))
    assert "Involuntary" not in capfd.readouterr().err


def test_a_check_that_would_see_nothing_is_refused(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    with pytest.raises(ReplicationError, match="TF_CPP_MIN_LOG_LEVEL=3 hides XLA's warnings"), refuse_replication():
        pass


def test_an_error_inside_the_block_comes_through_and_stderr_is_whole_again(capfd):
    import os

    with pytest.raises(ZeroDivisionError), refuse_replication():
        os.write(2, b"inside ")
        raise ZeroDivisionError
    os.write(2, b"outside")
    assert capfd.readouterr().err == "inside outside"


def test_bytes_of_a_tree_are_those_of_the_fullest_device():
    tree = {
        "split": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharded(("a", "b", "c"))),  # 2 * 8 * 4
        "whole": jax.ShapeDtypeStruct((6,), jnp.bfloat16, sharding=sharded()),  # 6 * 2
        "one": jax.ShapeDtypeStruct((5,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[3])),  # 5 * 4
        "host": jax.ShapeDtypeStruct((), jnp.int32),  # 4
    }
    assert tree_bytes(tree) == 64 + 12 + 20 + 4


def test_bytes_of_a_program_are_per_device():
    found = compiled_bytes(compile_reshard(sharded(("a", "b")), sharded(("a", "b"))))
    assert found["arguments_bytes"] == found["outputs_bytes"] == 16 * 16 * 4 // 4
    assert found["host_bytes"] == 0
    assert found["total_bytes"] == sum(found.values()) - found["total_bytes"] - 2 * found["aliased_bytes"]


def test_the_doctor_finds_what_is_here_and_says_how_to_mend_the_rest():
    rows = {row.name: row for row in doctor.examine()}
    assert rows["jax"].ok and rows["jax"].found == jax.__version__ and rows["python"].ok
    assert rows["devices"].found.startswith("8 x cpu")
    assert all(row.mend for row in rows.values() if not row.ok)
    assert {"jax-cuda12-plugin", "jax-triton", "ptxas", "cuDNN", "tokenizers", "pyarrow", "memory", "cores", "processes"} <= rows.keys()
    assert [row.name for row in rows.values() if row.needed and not row.ok] == []


def test_the_doctor_holds_versions_against_the_pins(monkeypatch):
    monkeypatch.setattr(doctor, "installed", {"jax": "0.10.0"}.get)
    rows = {row.name: row for row in doctor._packages()}
    assert not rows["jax"].ok and rows["jax"].found == "0.10.0" and "==0.11.2" in rows["jax"].mend
    assert not rows["flax"].ok and rows["flax"].found == "not installed" and rows["flax"].mend.startswith("pip install .")
    assert "'.[gpu]'" in rows["jax-triton"].mend and not rows["jax-triton"].needed


def test_the_doctor_recognises_a_cluster(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert "SLURM" in doctor._cluster().found
