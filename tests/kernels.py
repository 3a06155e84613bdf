"""The numerical tests under other CPU kernels and thread counts: `make test-kernels`.

A library computes the same product with other instructions on another CPU, and rounds it otherwise.
Its environment variables choose those instructions here. A setting that changes no bit of a probe
on this machine is said so and not run. `--short` takes four settings and the suites nearest to the
arithmetic; names take those settings alone. Of a suite all cases are run, also those that `make
test` leaves to `make test-full`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

TESTS = Path(__file__).parent
SELECTED = "not slow"  # and so the cases marked `full`, too: no numerical test is left out
NEAREST = (  # to the arithmetic: the short form
    "algorithms/golden",
    "objective/test_chained.py",
    "maths/test_compress.py",
    "maths/test_kronecker.py",
    "algorithm/test_local.py",
    "objective/test_objective.py",
    "maths/test_quasi_newton.py",
    "maths/test_symmetric.py",
)
NUMERICAL = (
    *NEAREST,
    "flower/test_legacy.py",
    "flower/test_parity.py",
    "flower/test_phased.py",
    "flower/test_privacy.py",
    "flower/test_strategy.py",
    "algorithms/test_algorithm_fedsso.py",
    "algorithms/test_cautious.py",
    "algorithm/test_client_optimizer.py",
    "repository/test_bench.py",
    "algorithms/test_contract.py",
    "engine/test_engine.py",
    "engine/test_engine_memory.py",
    "algorithms/test_exchanges.py",
    "algorithms/test_layered.py",
    "algorithms/test_memory.py",
    "algorithms/test_one_layer.py",
    "models/test_models.py",
    "engine/test_optim.py",
    "paper/test_paper_theory.py",
    "repository/test_robustness.py",
    "algorithm/test_schedule_theory.py",
    "engine/test_server.py",
)


class Setting(NamedTuple):
    """Environment variables, and what they choose."""

    name: str
    chooses: str
    env: dict[str, str]


OLD = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OPENBLAS_CORETYPE": "Nehalem"}
OLD |= {"ONEDNN_MAX_CPU_ISA": "SSE41", "NPY_DISABLE_CPU_FEATURES": ""}  # filled in by `environment`
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "OPENBLAS_CORETYPE": "Haswell"}
AVX2 |= {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
TWO = {"OMP_NUM_THREADS": "2"}
SETTINGS = (
    Setting("native", "nothing: this CPU's own kernels, 1 thread", {}),
    Setting("threads", "2 threads", TWO),
    Setting("avx2", "all libraries: AVX2", AVX2),
    Setting("old", "all libraries: the oldest kernels, 2 threads", OLD | TWO),
    Setting("old-1", "all libraries: the oldest kernels, 1 thread", OLD),
    Setting("aten-default", "torch: no vector instructions", {"ATEN_CPU_CAPABILITY": "default"}),
    Setting("aten-avx2", "torch: AVX2", {"ATEN_CPU_CAPABILITY": "avx2"}),
    Setting("mkl-compatible", "MKL: the path of every CPU", {"MKL_CBWR": "COMPATIBLE"}),
    Setting("mkl-cbwr-avx2", "MKL: the reproducible path of AVX2", {"MKL_CBWR": "AVX2"}),
    Setting("mkl-sse4", "MKL on Intel: SSE4.2", {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
    Setting("mkl-avx2", "MKL on Intel: AVX2", {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
    Setting("onednn-sse41", "oneDNN (convolutions): SSE4.1", {"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    Setting("onednn-avx2", "oneDNN (convolutions): AVX2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    Setting("openblas-nehalem", "numpy's OpenBLAS: SSE4.2", {"OPENBLAS_CORETYPE": "Nehalem"}),
    Setting("openblas-haswell", "numpy's OpenBLAS: AVX2", {"OPENBLAS_CORETYPE": "Haswell"}),
    Setting("openblas-skylakex", "numpy's OpenBLAS: AVX-512", {"OPENBLAS_CORETYPE": "SkylakeX"}),
    Setting("numpy-baseline", "numpy: baseline instructions", {"NPY_DISABLE_CPU_FEATURES": ""}),
)
SHORT = ("native", "threads", "avx2", "old")


class Row(NamedTuple):
    """A line of the table."""

    setting: str
    chooses: str
    seen: str
    tests: str
    seconds: str


def environment(setting: Setting) -> dict[str, str]:
    """This process's environment with the variables of this setting and of no other."""
    ours = {name for other in SETTINGS for name in other.env}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **setting.env}
    if "NPY_DISABLE_CPU_FEATURES" in setting.env:
        found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
        env["NPY_DISABLE_CPU_FEATURES"] = " ".join(found)
    return env


def digest(*arrays: torch.Tensor | np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def fingerprints() -> dict[str, str]:
    """The bits that each kind of kernel computes in this process, from numbers that every machine
    draws alike."""
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal((2, 200, 200))
    A, B = torch.from_numpy(a), torch.from_numpy(b)
    long = torch.from_numpy(draw.standard_normal(100_000))
    images = torch.from_numpy(draw.standard_normal((8, 3, 16, 16)))
    kernel = images[:6, :, :5, :5].contiguous()
    return {
        "torch products": digest(A @ B, A.float() @ B.float(), A @ B[0]),
        "torch solves": digest(
            torch.linalg.solve(A, B[0]), torch.linalg.qr(A).Q, torch.linalg.eigvalsh(A + A.T)
        ),
        "torch functions": digest(
            long.sum(), long.float().exp(), long.tanh(), A.float().log_softmax(-1)
        ),
        "convolutions": digest(torch.conv2d(images.float(), kernel.float())),
        "numpy products": digest(a @ b),
        "numpy solves": digest(np.linalg.solve(a, b[0]), np.linalg.eigvalsh(a + a.T)),
        "numpy functions": digest(
            a.sum(), np.exp(a), np.exp(a.astype(np.float32)), np.log(np.abs(a))
        ),
    }


def chosen() -> str:
    """What torch and OpenBLAS say of themselves in this process."""
    from threadpoolctl import threadpool_info

    cores = [
        info["architecture"] for info in threadpool_info() if info["internal_api"] == "openblas"
    ]
    return (
        f"torch {torch.backends.cpu.get_cpu_capability()}, OpenBLAS {', '.join(cores) or 'absent'}"
    )


def probe(setting: Setting) -> tuple[dict[str, str], str]:
    """Fingerprints, and what the libraries say, of a fresh process with this setting."""
    command = [sys.executable, __file__, "--probe"]
    done = subprocess.run(
        command, env=environment(setting), check=True, capture_output=True, text=True
    )
    told = json.loads(done.stdout)
    return told["fingerprints"], told["chosen"]


def run(setting: Setting, files: Sequence[str], jobs: int) -> tuple[bool, str]:
    """Whether the tests pass with this setting, and how many; what fails is shown, with the way to
    see it again."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        SELECTED,
        "-n",
        str(jobs),
        "-p",
        "no:cacheprovider",
    ]
    env = environment(setting)
    done = subprocess.run(
        [*command, *files], cwd=TESTS.parent, env=env, capture_output=True, text=True
    )
    if done.returncode:
        again = " ".join(f"{name}={env[name]!r}" for name in setting.env)
        print(
            done.stdout[-20_000:],
            done.stderr[-5_000:],
            f"again: {again} pytest TEST",
            sep="\n",
            flush=True,
        )
    last = [
        line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed|error)", line)
    ]
    count = re.sub(r" in .*|=+ ?", "", last[-1]) if last else f"pytest ended with {done.returncode}"
    return done.returncode == 0, count


def judge(
    setting: Setting, native: dict[str, str], files: Sequence[str], jobs: int
) -> tuple[bool, Row]:
    """Probe a setting; run the tests if it changes a bit, or is the native one."""
    begin = time.monotonic()
    found, says = probe(setting)
    differ = [kind for kind, value in found.items() if value != native[kind]]
    good, count = True, "not run: it changes nothing here"
    if differ or setting.name == "native":
        good, count = run(setting, files, jobs)
    seen = f"{says}; other bits in: {', '.join(differ) or 'nothing'}"
    return good, Row(setting.name, setting.chooses, seen, count, f"{time.monotonic() - begin:.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="settings, by default all")
    parser.add_argument(
        "--short", action="store_true", help=f"{', '.join(SHORT)}, on the nearest suites"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of pytest")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe:
        print(json.dumps({"fingerprints": fingerprints(), "chosen": chosen()}))
        return 0
    names = given.names or (SHORT if given.short else [setting.name for setting in SETTINGS])
    known = {setting.name: setting for setting in SETTINGS}
    if unknown := set(names) - known.keys():
        parser.error(f"unknown setting {', '.join(sorted(unknown))}; use {', '.join(known)}")
    native, _ = probe(known["native"])
    files = [str(TESTS / file) for file in (NEAREST if given.short else NUMERICAL)]
    print(f"| {' | '.join(Row._fields)} |\n|{' --- |' * len(Row._fields)}", flush=True)
    all_good = True
    for name in names:
        good, row = judge(known[name], native, files, given.jobs)
        print(f"| {' | '.join(row)} |", flush=True)
        all_good &= good
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
