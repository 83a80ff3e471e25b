"""Several processes: who they are, and the end of the others when one is lost."""

import os
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from moejax.config.errors import ConfigError
from moejax.config.mesh import ProcessConfig
from moejax.parallel import processes, watch
from moejax.parallel.watch import EXIT_LOST

TIMEOUT_S = 10
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_VERSION": "4.1.6",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
VARIABLES = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS", "JOB_COMPLETION_INDEX", *SLURM, *OPEN_MPI)


@pytest.fixture
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_one_process_is_the_default(environment):
    assert processes.find_place(ProcessConfig()) is None
    assert processes.initialize(ProcessConfig()) is None


def test_flags_go_before_the_environment(environment):
    environment(**SLURM)
    place = processes.find_place(ProcessConfig(coordinator="a:1", num_processes=2, process_id=0))
    assert (place.coordinator, place.num_processes, place.process_id, place.source) == ("a:1", 2, 0, "processes.*")


def test_slurm_gives_the_address_and_all_gpus_of_a_node_to_its_one_task(environment):
    environment(**SLURM)
    place = processes.find_place(ProcessConfig())
    assert place.coordinator.startswith("node03:") and (place.num_processes, place.process_id) == (4, 2)
    assert place.local_device_ids is None and place.source == "SLURM"
    environment(SLURM_STEP_NUM_NODES="2", SLURM_LOCALID="1")
    assert processes.find_place(ProcessConfig()).local_device_ids == (1,)


def test_open_mpi_gives_the_address(environment):
    environment(**OPEN_MPI)
    place = processes.find_place(ProcessConfig())
    assert place.coordinator.startswith("10.96.0.1:") and (place.num_processes, place.process_id) == (2, 1)
    assert place.local_device_ids == (1,) and place.source == "Open MPI"


def test_an_indexed_kubernetes_job_needs_but_its_size(environment, monkeypatch):
    environment(JAX_NUM_PROCESSES="3", JOB_COMPLETION_INDEX="2")
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-2.pods.default.svc.cluster.local")
    place = processes.find_place(ProcessConfig())
    assert place.coordinator == "train-0.pods.default.svc.cluster.local:55527"
    assert (place.num_processes, place.process_id, place.source) == (3, 2, "Kubernetes")


def test_an_environment_that_says_half_is_an_error(environment):
    environment(JAX_NUM_PROCESSES="3")
    with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES=3 is set, but JAX_PROCESS_ID=None"):
        processes.find_place(ProcessConfig())


def test_devices_cannot_be_pretended_too_late():
    processes.simulate_devices(jax.local_device_count())
    with pytest.raises(ConfigError, match=r"mesh\.simulate_devices=3 comes too late: JAX has started with 8 cpu device\(s\)"):
        processes.simulate_devices(3)


def take_part(mode, victim, port, process_id):
    """One of two processes: three collectives, then the victim dies or fails while the other waits for it in the fourth."""
    import numpy as np
    from jax.experimental import multihost_utils

    processes.simulate_devices(1)
    processes.initialize(ProcessConfig(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=process_id, timeout_s=TIMEOUT_S))
    if mode == "stop":
        return stop_together(victim, process_id)
    processes.agree("config", f"steps: 3\nwidth: {process_id if mode == 'differ' else 8}")
    for step in range(4):
        if step == 3 and mode == "die" and process_id == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and mode == "fail" and process_id == victim:
            raise KeyError("a bad record")
        if step == 3 and mode == "refuse" and process_id == victim:
            watch.report(ConfigError("data.sources.0.path is not there"))
        total = multihost_utils.process_allgather(np.full(3, process_id)).sum()
    sys.stdout.write(f"sum {total}\nprograms read back: {jax.config.jax_enable_compilation_cache}\n")


def stop_together(victim, process_id):
    """The victim is asked to stop at step 3; both print the step at which they do."""
    import numpy as np
    from jax.experimental import multihost_utils

    from moejax.checkpoint.stop import StopSignal

    stop = StopSignal(timeout_s=60)
    for step in range(1000):
        if step == 3 and process_id == victim:
            os.kill(os.getpid(), signal.SIGTERM)
        multihost_utils.process_allgather(np.ones(3))
        time.sleep(0.02)
        if stop.reached(step):
            break
    stop.close()
    sys.stdout.write(f"stopped at {step}\n")


def start_pair(mode, victim):
    """Return codes, seconds from the death on, outputs and errors of both processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = [
        subprocess.Popen(
            [sys.executable, __file__, mode, str(victim), str(port), str(i)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    ended_s, began_s = {}, time.monotonic()
    while len(ended_s) < 2:
        if time.monotonic() - began_s > 90:
            for process in pair:
                process.kill()
        for i, process in enumerate(pair):
            if process.poll() is not None:
                ended_s.setdefault(i, time.monotonic())
        time.sleep(0.05)
    outputs = [process.communicate() for process in pair]
    return [process.returncode for process in pair], ended_s[1 - victim] - ended_s[victim], outputs


def test_two_processes_join_and_end():
    codes, _, outputs = start_pair("end", 0)
    assert codes == [0, 0], outputs[0][1][-2000:]
    assert ["sum 3\nprograms read back: False\n" in out for out, _ in outputs] == [True, True]
    assert "moejax:" not in outputs[0][1] + outputs[1][1]


def test_when_one_is_asked_to_stop_all_stop_at_the_same_step():
    codes, _, outputs = start_pair("stop", 1)
    assert codes == [0, 0], outputs[0][1][-2000:]
    first, second = (out.splitlines()[-1] for out, _ in outputs)
    assert first == second and first.startswith("stopped at ") and 3 <= int(first.split()[-1]) < 999


def test_processes_with_other_configs_end_with_the_lines_that_differ():
    codes, _, outputs = start_pair("differ", 0)
    assert 0 not in codes
    assert "config: process 1 has 'width: 1' where process 0 has 'width: 0'" in outputs[0][1] + outputs[1][1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_and_the_other_ends_in_time(victim):
    codes, seconds, outputs = start_pair("die", victim)
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == EXIT_LOST, outputs[1 - victim][1][-2000:]
    assert seconds <= TIMEOUT_S
    assert f"moejax: process {victim} of 2 (host {socket.gethostname()}, pid " in outputs[1 - victim][1]


def test_a_process_that_fails_is_named_with_its_error():
    codes, seconds, outputs = start_pair("fail", 1)
    assert codes == [EXIT_LOST, 1], outputs[0][1][-2000:]
    assert seconds <= TIMEOUT_S
    assert f"moejax: process 1 of 2 (host {socket.gethostname()}" in outputs[0][1] and "failed: KeyError: 'a bad record'" in outputs[0][1]


def test_a_process_that_refuses_its_config_is_named_with_what_it_says():
    codes, seconds, outputs = start_pair("refuse", 1)
    assert codes == [EXIT_LOST, 1], outputs[0][1][-2000:]
    assert seconds <= TIMEOUT_S
    assert "failed: ConfigError: data.sources.0.path is not there" in outputs[0][1]


def test_a_pretended_device_keeps_its_memory():
    """What is mapped anew must be cleared anew: 256 MB of temporaries are 65,536 faults of 4 KB, or 128 of 2 MB, in each call.

    The heap may still grow in a few calls, as small objects come to lie between the big ones: in 40 runs of 60 calls up to 9 times, always
    within the first 20 calls. So what counts is the middle one of 40 calls.
    """
    script = """
import resource, jax, jax.numpy as jnp
from moejax.parallel.processes import simulate_devices

simulate_devices(1)
run = jax.jit(lambda x: jax.lax.optimization_barrier(x[:, None] * x).sum())
x, faults = jnp.ones(8192), []
print(run.lower(x).compile().memory_analysis().temp_size_in_bytes)
for _ in range(41):
    run(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(sorted(after - before for before, after in zip(faults, faults[1:]))[20])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    temporaries, faults = map(int, done.stdout.split())
    assert temporaries >= 2**28
    assert faults < 64  # a few of Python's own


if __name__ == "__main__":
    take_part(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
