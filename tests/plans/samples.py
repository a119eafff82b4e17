"""A complete plan with made-up content, for tests of files, stores and keys."""

from __future__ import annotations

from plans.key import make_key
from plans.machine import ReadRate
from plans.plan import (
    FORMAT_VERSION,
    CandidateResult,
    EngineBuild,
    Evidence,
    FileIdentity,
    Limits,
    MemoryNeed,
    ModelIdentity,
    Plan,
    Rejected,
    RequestMix,
    Trial,
    Workload,
)
from tests.planner.fakes import machine_host, placement

TWO_BUILDS = (EngineBuild("native", "1"), EngineBuild("llama-server", "1"))


def workload() -> Workload:
    return Workload(4096, 1, ("f16",), RequestMix(512, 128))


def sample_plan(
    created_at: str = "2026-05-01T10:00:00+00:00",
    files: tuple[FileIdentity, ...] = (FileIdentity("/models/fake.gguf", 10, "ab" * 32),),
    builds: tuple[EngineBuild, ...] = (EngineBuild("native", "0.1.0", "cd" * 32, "/lib.so"),),
) -> Plan:
    host = machine_host()
    trial = Trial("native d2", 1, "train", "prose", 512, 64, False, 0.8, 640.0, 150.5, True)
    return Plan(
        format_version=FORMAT_VERSION,
        placewright_version="0.1.0",
        created_at=created_at,
        model=ModelIdentity('Fäke "200M"', "llama", tuple(file.path for file in files), 10),
        placement=placement(),
        workload=workload(),
        key=make_key(files, host.fingerprint, builds, workload(), Limits(engines=("native",))),
        host=host,
        ram_read=(ReadRate(1, True, 2.0e10),),
        memory=MemoryNeed(100, 200, 300),
        evidence=Evidence(
            20.0,
            18.5,
            "separated",
            "faster",
            0,
            (CandidateResult("native d2", "native", None, 3, None, 1.25, 640.0, 150.5, 0.8, 1.0),),
            (trial,),
        ),
        rejected=(Rejected("native d1", "cost", "predicted slower", 2),),
    )
