"""Fill `peers/` with what the benchmarks compare against: ``python scripts/fetch_peers.py [--python 3.12]``.

rl-triton, and the PufferLib 3.0.0 kernel that it keeps a copy of, come from its Git repository; verl, torchrl and accelerated-scan from the package
index, without what they need but the benchmarks do not. Nothing here is ever committed. `--python` is the version of the interpreter that will run
the benchmarks, where that is another machine's; the folder is small enough to be copied there.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PEERS = Path(__file__).resolve().parent.parent / "peers"
RL_TRITON = "https://github.com/simonsays1980/rl-triton"
RL_TRITON_COMMIT = "ee985e6"
PUFFERLIB = {  # of pufferlib 3.0.0's own sources
    "pufferlib.cpp": "3efbfd62a5b2875451cc77bbb5cdb70a48001400e43cb3a4bbb724a926ee9a53",
    "pufferlib.cu": "8154ba37ea6a722a13aa115734680d90c350699c7e6a7b7d8b811611f7f0fdc3",
}
PACKAGES = ("verl==0.9.1", "torchrl==0.14.1", "tensordict==0.15.3", "pyvers==0.2.3", "cloudpickle==3.1.3", "accelerated-scan==0.3.1")
SUPERFLUOUS = (
    "tests",
    "scripts",
    "benchmarks",
    "sota-implementations",
    "sota-check",
    "examples",
    "tutorials",
    "bin",
)  # what wheels leave beside their packages


def main() -> None:
    """Fill the folder anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", metavar="VERSION")
    parser.add_argument(
        "--rl-triton", default=RL_TRITON, metavar="REPOSITORY", help=f"a Git repository that holds commit {RL_TRITON_COMMIT}"
    )
    options = parser.parse_args()
    repositories(options.rl_triton)
    packages(options.python)
    size = sum(file.stat().st_size for file in PEERS.rglob("*") if file.is_file())
    print(f"{PEERS}: {size / 2**20:.0f} MiB")


def repositories(source: str) -> None:
    """rl-triton's package, and PufferLib's kernel."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "rl-triton"
        subprocess.run(["git", "clone", "--quiet", source, str(clone)], check=True)
        subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", RL_TRITON_COMMIT], check=True)
        for name in ("rl-triton", "PufferLib"):
            shutil.rmtree(PEERS / name, ignore_errors=True)
        shutil.copytree(clone / "src", PEERS / "rl-triton" / "src")
        for name in ("pyproject.toml", "LICENSE"):
            shutil.copy(clone / name, PEERS / "rl-triton" / name)
        kernel = clone / "benchmarks" / "pufferlib_ext"
        shutil.copytree(kernel, PEERS / "PufferLib", ignore=shutil.ignore_patterns("*.py", "*.md"))
    for name, known in PUFFERLIB.items():
        found = hashlib.sha256((PEERS / "PufferLib" / name).read_bytes()).hexdigest()
        if found != known:
            raise SystemExit(f"{name} is not that of PufferLib 3.0.0: its SHA-256 is {found}, not {known}")


def packages(python: str) -> None:
    """What the package index has, for that version of Python."""
    site = PEERS / "site"
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(site)]
    subprocess.run([*command, "--only-binary=:all:", f"--python-version={python}", *PACKAGES], check=True)
    for name in SUPERFLUOUS:
        shutil.rmtree(site / name, ignore_errors=True)


if __name__ == "__main__":
    main()
