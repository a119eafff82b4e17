"""Runs the server of the package `xllamacpp` until its parent ends it: `python xllamacpp_server.py SETTINGS_AS_JSON`.

Started as a script by the llama-server engine; the server inside the library speaks the same HTTP as the
program.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

_LOAD_MODE_NONE, _LOAD_MODE_MMAP = 0, 1


def serve(settings: dict[str, Any]) -> None:
    """Blocks until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["model_path"]
    params.hostnames = [settings["host"]]
    params.port = settings["port"]
    params.n_ctx = settings["context_tokens"]
    params.n_parallel = settings["sequences"]
    params.n_batch = settings["batch_tokens"]
    params.n_ubatch = settings["ubatch_tokens"]
    params.n_gpu_layers = settings["gpu_layers"]
    params.cache_ram_mib = 0
    params.load_mode = _LOAD_MODE_MMAP if settings["mmap"] else _LOAD_MODE_NONE
    kv_type = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings['kv_type'].upper()}")
    params.cache_type_k = params.cache_type_v = kv_type
    for cpu_params, n_threads in (
        (params.cpuparams, settings["decode_threads"]),
        (params.cpuparams_batch, settings["prefill_threads"]),
    ):
        cpu_params.n_threads = n_threads
        if settings["cpus"]:
            cpu_params.cpumask = [cpu in settings["cpus"] for cpu in range(len(cpu_params.cpumask))]
            cpu_params.mask_valid = cpu_params.strict_cpu = True
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
