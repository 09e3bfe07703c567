"""Set up .venv for `make demo` (profile demo) and for `make test` and `make check` (profile dev).

Runs on any Python 3.7 or newer and needs nothing but its standard library. Where there is nothing to do it returns at once; a run that was
killed half-way is noticed, and the environment is built anew. Where an interpreter already has a torch that sees CUDA, the environment is
built on top of it: its torch stays, its other packages are used, and only what is missing is installed, without network if nothing is.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from progress import Progress, StepError

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "rlhf-scan-setup.json"
BUILD = ROOT / "build"
UNFINISHED = BUILD / "setup-unfinished"
LOG = BUILD / "setup.log"

PROFILES = {"demo": ["triton", "server"], "dev": ["dev"]}  # extras of pyproject.toml; dev holds all others
OLDEST = (3, 11)
CANDIDATES = ["python3", "python3.11", "python3.12", "python3.13", "python3.14", "/usr/bin/python3"]

PROBE = """
import importlib.util, json, os, site, sys
has = lambda name: importlib.util.find_spec(name) is not None
found = {
    "path": sys.executable, "version": sys.version_info[:3], "base": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "nested": sys.prefix != sys.base_prefix, "packages": site.getsitepackages(),
    "venv": has("venv") and has("ensurepip"), "pip": has("pip"), "cuda": None,
}
if has("torch"):
    import torch
    found["cuda"] = torch.__version__ if torch.cuda.is_available() else None
print(json.dumps(found))
"""

# Which of the distributions in argv the environment takes from outside itself, and in which version.
PROVIDED = """
import importlib.metadata, json, os, sys
found = {}
for name in sys.argv[1:]:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    if not os.path.realpath(distribution.locate_file("")).startswith(os.path.realpath(sys.prefix) + os.sep):
        found[name] = distribution.version
print(json.dumps(found))
"""

SUMMARY = """
import platform, torch, rlhf_scan
device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
print(f"Python {platform.python_version()}, torch {torch.__version__}{device}")
"""


class SetupError(Exception):
    """The environment cannot be set up; the message says why and what to do."""


def probe(python):
    """What the interpreter `python` is and has; None where it does not run."""
    path = shutil.which(str(python))
    if path is None:
        return None
    try:
        answer = subprocess.run(
            [path, "-c", PROBE], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120
        )
        return json.loads(answer.stdout.decode().splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


def choose_interpreter(asked):
    """The interpreter to build on: the one asked for, else the first whose torch sees CUDA, else the first that will do."""
    found = {entry["path"]: entry for entry in map(probe, [asked] if asked else CANDIDATES) if entry}.values()
    usable = [entry for entry in found if tuple(entry["version"][:2]) >= OLDEST and (entry["venv"] or (entry["cuda"] and entry["pip"]))]
    if usable:
        return next((entry for entry in usable if entry["cuda"]), usable[0])
    seen = [f"{entry['path']} is {dotted(entry['version'])}{'' if entry['venv'] else ' and lacks venv'}" for entry in found]
    raise SetupError(
        f"Python {dotted(OLDEST)} or newer with venv is needed; {', '.join(seen) or f'{asked or CANDIDATES} did not run'}. "
        "Install one (Debian, Ubuntu: apt install python3 python3-venv) or name another: make PYTHON=/path/to/python3.12 ..."
    )


def dotted(version):
    """(3, 11) as 3.11."""
    return ".".join(map(str, version))


def is_built_on(interpreter):
    """Whether .venv is whole and stands on `interpreter`."""
    here = probe(PYTHON)
    if here is None or UNFINISHED.exists():
        return False
    return here["pip"] and here["base"] == interpreter["base"] and interpreter["cuda"] in (None, here["cuda"])


def make_environment(progress, interpreter):
    """An empty .venv, on top of the packages of `interpreter` where its torch sees CUDA."""
    command = [interpreter["path"], "-m", "venv", "--clear", str(VENV)]
    if interpreter["cuda"]:
        command.append("--system-site-packages")
        if interpreter["pip"]:
            command.append("--without-pip")  # the one that is there will do; such a Python may lack ensurepip
    progress.run(f"Python {dotted(interpreter['version'])} environment", command)
    if interpreter["cuda"] and interpreter["nested"]:
        # venv looks through to the base installation; torch lies in the environment that `interpreter` belongs to.
        (packages,) = VENV.glob("lib/python*/site-packages")
        (packages / "rlhf-scan-existing-torch.pth").write_text("".join(f"{path}\n" for path in interpreter["packages"]))


def pins():
    """constraints.txt as {name: version}."""
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def pins_beside_existing_torch():
    """The pins of what is missing; torch and its triton are held as they are, nothing else that is there is pinned."""
    answer = subprocess.run([str(PYTHON), "-c", PROVIDED, *pins()], stdout=subprocess.PIPE, check=True)
    provided = json.loads(answer.stdout.decode())
    path = BUILD / "constraints-existing-torch.txt"
    held = {name: provided.get(name, version) for name, version in pins().items() if name in ("torch", "triton") or name not in provided}
    path.write_text("".join(f"{name}=={version}\n" for name, version in held.items()))
    return path


def install(progress, interpreter, extras):
    """Install the package, editable, with `extras`; returns a line that says what is there."""
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    if interpreter["cuda"]:
        constraints = pins_beside_existing_torch()
    else:
        constraints = ROOT / "constraints.txt"
        torch = f"torch=={pins()['torch']}"
        progress.run(torch, [*pip, torch])  # alone and in this form, which finds a CPU build where pip's settings point to one
    progress.run("setuptools", [*pip, "setuptools>=77", f"--constraint={constraints}"])
    package = f".[{','.join(extras)}]"
    progress.run(f"rlhf-scan{package[1:]}", [*pip, "--no-build-isolation", f"--constraint={constraints}", "--editable", package])
    return progress.run("check", [str(PYTHON), "-c", SUMMARY])


def fingerprint():
    """Changes with what must be installed, and with the place of the checkout, which an environment holds in absolute paths."""
    parts = [(ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml", "scripts/setup.py")]
    return hashlib.sha256(b"\0".join([*parts, str(ROOT).encode()])).hexdigest()


def read_stamp():
    """What the last finished set-up left; empty where there is none."""
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def set_up(profile, asked):
    """Bring .venv to `profile`."""
    stamp = read_stamp()
    asked = asked or stamp.get("asked", "")
    current = stamp.get("fingerprint") == fingerprint() and stamp.get("asked") == asked and PYTHON.exists()
    if current and not UNFINISHED.exists() and {profile, "dev"} & set(stamp["profiles"]):
        return
    BUILD.mkdir(exist_ok=True)
    LOG.write_text("")
    print(f"Setting up .venv for {profile} (once; all output in {LOG.relative_to(ROOT)})", flush=True)
    progress = Progress(LOG)
    interpreter = choose_interpreter(asked)
    if interpreter["cuda"]:
        print(f"  On top of {interpreter['path']}, whose torch {interpreter['cuda']} sees CUDA; it gets what is missing", flush=True)
    whole = is_built_on(interpreter) and stamp.get("root", str(ROOT)) == str(ROOT)
    UNFINISHED.touch()
    if not whole:
        make_environment(progress, interpreter)
    try:
        summary = install(progress, interpreter, PROFILES[profile])
    except StepError:
        UNFINISHED.unlink()  # pip stopped in order, so the next run can go on from here
        raise
    profiles = sorted({profile, *(stamp["profiles"] if current else [])})
    STAMP.write_text(json.dumps({"fingerprint": fingerprint(), "profiles": profiles, "asked": asked, "root": str(ROOT)}))
    UNFINISHED.unlink()
    print(f"Ready in {progress.elapsed():.0f} s: {summary}\n", flush=True)


@contextlib.contextmanager
def only_one():
    """Wait for another set-up of this checkout to end."""
    with (ROOT / "pyproject.toml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", choices=sorted(PROFILES))
    parser.add_argument("--python", default="", help="interpreter to build on; default: one whose torch sees CUDA, else any")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    try:
        with only_one():
            set_up(arguments.profile, arguments.python)
    except StepError as error:
        sys.exit(f"\n{error}\n\nsetup: the step above failed; all output is in {LOG}. Once the cause is gone, run the same command again.")
    except SetupError as error:
        sys.exit(f"setup: {error}")
    except KeyboardInterrupt:
        sys.exit("\nsetup: interrupted; run the same command again")


if __name__ == "__main__":
    main()
