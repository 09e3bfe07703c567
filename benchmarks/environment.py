"""Where the figures were measured: device, clocks, versions, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import rlhf_scan

PACKAGES = ("torch", "triton", "numpy", "numba", "trl", "verl", "torchrl", "tensordict", "accelerated-scan", "transformers")
RL_TRITON = "rl-triton/pyproject.toml"


def environment(peers: Path) -> dict[str, Any]:
    """As plain data."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "clocks": clocks(),
        "cuda": torch.version.cuda,
        "versions": {"rlhf-scan": rlhf_scan.__version__, "python": platform.python_version(), **versions(peers)},
    }


def versions(peers: Path) -> dict[str, str]:
    """Of what is installed or lies among the peers."""
    found: dict[str, str] = {}
    where = [str(peers / "site")]
    for name in PACKAGES:
        for distribution in (*importlib.metadata.distributions(name=name), *importlib.metadata.distributions(name=name, path=where)):
            found.setdefault(name, distribution.version)
    for line in (peers / RL_TRITON).read_text().splitlines() if (peers / RL_TRITON).is_file() else ():
        if line.startswith("version = "):
            found["rl-triton"] = line.split('"')[1]
    if (peers / "PufferLib").is_dir():
        found["PufferLib"] = "3.0.0"
    return found


def commit() -> str:
    """What is measured; RLHF_SCAN_COMMIT where the tree was copied without its history."""
    known = os.environ.get("RLHF_SCAN_COMMIT")
    if known:
        return known
    here = Path(__file__).resolve().parent
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def processor() -> str:
    """The CPU's name and its cores."""
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.is_file()
        else []
    )
    return f"{names[0] if names else platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def clocks() -> str:
    """What nvidia-smi says of the clocks: now, and at most."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"
