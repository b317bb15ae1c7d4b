"""The configuration that `install-service` writes where there is none: what this machine has, choices named."""

from __future__ import annotations

from collections.abc import Sequence

_HEAD = """\
# pingpongd, written by `pingpongd install-service`; yours to change. `pingpongd check --config {path}` examines it.
# A change takes effect with `systemctl {user}restart {unit}`; some already with `systemctl {user}reload {unit}`.

model = "{model}"    # a Hugging Face name, a folder{embedded}
drain_seconds = 30          # how long a stop waits for running chains; the others go on at the next start
"""

_SYSTEM = """\
client_group = "pingpong"   # its members may use this daemon
"""

_VLLM = """
[vllm]                      # any argument of vLLM's AsyncEngineArgs
"""

_CPU = """\
max_model_len = 4096
max_num_seqs = 16
enforce_eager = true        # compilation takes a minute and gains little on a CPU

[environment]               # of every worker
VLLM_CPU_KVCACHE_SPACE = "1"        # GiB for each engine
"""

_GPU = """\
gpu_memory_utilization = 0.9
"""

_GROUP = """
[[groups]]                  # one engine; agents alternate between groups
name = "{name}"
devices = ["{device}"]
"""


def first_config(
    *, path: str, unit: str, user: bool, gpus: int, cores: Sequence[int], embedded: str = "smollm2-135m"
) -> str:
    """A configuration for this machine.

    Args:
        path: where it will be.
        unit: of the service.
        user: it is for a user's own daemon.
        gpus: how many GPUs there are; 0: engines run on cores.
        cores: that may be used; two of them get an engine each, or one where there is but one.
        embedded: the small model that a CPU installation brings.
    """
    text = _HEAD.format(
        path=path,
        unit=unit.removesuffix(".service"),
        user="--user " if user else "",
        # An installation for GPUs lacks what converts the embedded model; this is the same one, ready-made.
        model="HuggingFaceTB/SmolLM2-135M-Instruct" if gpus else embedded,
        embedded="" if gpus else f', or "{embedded}"',
    )
    if not user:
        text += _SYSTEM
    if not gpus:
        text += 'dtype = "float32"           # so that read-ahead and series give the same tokens\n'
    text += _VLLM + (_GPU if gpus else _CPU)
    devices = [f"cuda:{index}" for index in range(gpus)] or [f"cpu:{core}" for core in list(cores)[:2]]
    return text + "".join(_GROUP.format(name=device.replace(":", ""), device=device) for device in devices)
