"""Machine code that the CPU backend keeps on disk: later processes compile nothing, and none ever runs what another function was compiled to."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from numba import njit
from numba.extending import overload

from rlhf_scan import gae
from rlhf_scan.backends import cpu_backend, cpu_compile, cpu_disk_cache, cpu_sweep
from rlhf_scan.backends.cpu_arrays import compiled
from rlhf_scan.backends.cpu_fingerprint import Unknown, fingerprint
from rlhf_scan.backends.formulas import compiled_formula

NOWHERE = os.devnull + "/none"  # no directory can be made there

# Prints how many functions numba compiled, and a digest of the outputs of each call.
PROGRAM = """
import hashlib, json, sys
import torch
from numba.core import event
import rlhf_scan

compiled = []
class Listener(event.Listener):
    def on_start(self, event):
        compiled.append(event)
    def on_end(self, event):
        pass
event.register("numba:compile", Listener())

random = torch.Generator().manual_seed(3)
x, y, p = (torch.rand(4, 50, generator=random) for _ in range(3))
mask = x < 0.8
long = torch.rand(1 << 19, generator=random)
q = torch.rand(4, 50, 3, generator=random)
calls = {
    "gae": lambda: [*rlhf_scan.gae(x, y), *rlhf_scan.gae(x, y, mask=mask, terminated=p < 0.1, lam_value=1.0)],
    "double": lambda: rlhf_scan.gae(x.double(), y.double()),
    "long": lambda: rlhf_scan.gae(long, long),
    "returns": lambda: [rlhf_scan.discounted_returns(x, mask=mask)],
    "vtrace": lambda: rlhf_scan.vtrace(x, y, -x, -y, gamma=0.9),
    "policy": lambda: rlhf_scan.retrace_from_policy(x, y, q, q.softmax(-1), -x, -y),
    "whiten": lambda: [rlhf_scan.whiten(x, mask)],
    "shape": lambda: [rlhf_scan.ppo_advantages(-x, -y, y, scores=x[:, 0], mask=torch.ones(4, 50)).rewards],
}
bits = [[hashlib.sha256(out.numpy().tobytes()).hexdigest() for out in calls[name]()] for name in sys.argv[1:]]
print(json.dumps([len(compiled), bits]))
"""
ALL = "gae", "double", "long", "returns", "vtrace", "policy", "whiten", "shape"


def started(cache: Path | str, program: str, *arguments: str, path: Path | None = None) -> subprocess.Popen[str]:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> Any:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(out)


def run(cache: Path | str, *calls: str) -> Any:
    """How many functions a process compiled that made these calls, and the bits of each."""
    return ended(started(cache, PROGRAM, *calls))


@pytest.fixture(scope="module")
def uncached() -> dict[str, list[str]]:
    """The bits of each call where nothing is kept."""
    compiled, bits = run(NOWHERE, *ALL)
    assert compiled > 100
    return dict(zip(ALL, bits, strict=True))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds what `gae` calls need."""
    cache = tmp_path_factory.mktemp("cache")
    assert run(cache, "gae")[0] > 0
    return cache


def files(cache: Path) -> list[Path]:
    return sorted((cache / "rlhf_scan").iterdir())


def test_a_later_process_compiles_nothing_and_gets_the_same_bits(tmp_path: Path, uncached: dict[str, list[str]]) -> None:
    first, second = run(tmp_path, *ALL), run(tmp_path, *ALL)
    assert first[0] > 100
    assert second[0] == 0
    assert first[1] == second[1] == list(uncached.values())


def test_what_is_compiled_beside_what_is_loaded_changes_neither(filled: Path, tmp_path: Path, uncached: dict[str, list[str]]) -> None:
    """Numba numbers functions by the order in which a process compiles them; its symbols of different ones in two processes may be the same."""
    cache = shutil.copytree(filled, tmp_path / "cache")
    for calls in (("returns", "gae", "vtrace"), ("vtrace", "double", "returns", "gae")):
        assert run(cache, *calls)[1] == [uncached[call] for call in calls]


def test_processes_that_start_at_once(tmp_path: Path, uncached: dict[str, list[str]]) -> None:
    processes = [started(tmp_path, PROGRAM, *calls) for calls in (("gae", "returns"), ("returns", "gae"), ("gae", "returns"))]
    found = [ended(process)[1] for process in processes]
    assert found[0] == found[2] == found[1][::-1] == [uncached["gae"], uncached["returns"]]
    assert run(tmp_path, "returns", "gae")[0] == 0
    assert all(len(file.name) == 64 for file in files(tmp_path))  # no leftovers


def test_a_spoiled_file_is_compiled_anew(filled: Path, tmp_path: Path, uncached: dict[str, Any]) -> None:
    cache = shutil.copytree(filled, tmp_path / "cache")
    for file, spoil in zip(files(cache), SPOILS * 9, strict=False):
        file.write_bytes(spoil(file.read_bytes()))
    compiled, bits = run(cache, "gae")
    assert compiled > 0
    assert bits == [uncached["gae"]]
    assert run(cache, "gae") == [0, bits]


SPOILS: list[Callable[[bytes], bytes]] = [
    lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:],
    lambda data: data[:-1],
    lambda data: data + b"?",
    lambda data: data[:20],
    lambda data: b"",
    lambda data: b"?" * 9999,
]


@pytest.mark.parametrize("spoil", SPOILS, ids=["one bit", "cut short", "longer", "no payload", "empty", "other bytes"])
def test_a_spoiled_file_is_not_read(spoil: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_disk_cache, "directory", lambda: tmp_path)
    cpu_disk_cache._write("entry", bytes(200))
    assert cpu_disk_cache._read("entry") == bytes(200)
    (tmp_path / "entry").write_bytes(spoil((tmp_path / "entry").read_bytes()))
    assert cpu_disk_cache._read("entry") is None


OWN = """
from rlhf_scan.coefficients import scanned_results
from rlhf_scan.estimators import Estimator, Rate, register
from rlhf_scan.naive import discounted_returns

CONSTANT = 2.0

def helper(x, factor=1.0):
    return x * factor + 1.0

def inner(x):
    return helper(x) * CONSTANT

def coefficients(here, following, rates):
    return inner(here[0]), rates[0]

register(Estimator(name="own", summary="", inputs=("rewards",), outputs=("returns",), rates={"gamma": Rate(0.5)}, channels=(("gamma",),),
    coefficients=coefficients, results=scanned_results, naive=discounted_returns, end="carry"))
"""
USE_OWN = (
    PROGRAM.partition("random =")[0]
    + """
import own_estimator
found = rlhf_scan.LocalEngine("cpu").run(rlhf_scan.CreditRequest("own", {"rewards": torch.tensor([1.0, 3.0])})).tensors["returns"]
print(json.dumps([len(compiled), found.tolist()]))
"""
)


def test_a_changed_formula_gives_the_new_numbers(tmp_path: Path) -> None:
    """Whatever of it changed, in a file of the same size and time."""
    file, cache = tmp_path / "own_estimator.py", tmp_path / "cache"
    for old, new, last in [
        ("", "", 8.0),
        ("CONSTANT = 2.0", "CONSTANT = 3.0", 12.0),
        ("factor + 1.0", "factor + 2.0", 10.0),
        ("factor=1.0", "factor=5.0", 32.0),
        ("here[0]", "here[0]", 8.0),
    ]:
        file.write_text(OWN.replace(old, new))
        os.utime(file, (1e9, 1e9))
        compiled, (_, found) = ended(started(cache, USE_OWN, path=tmp_path))
        assert found == last
        assert (compiled == 0) == (old == new != "")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, 0o777])
@pytest.mark.parametrize("owner", ["this user", "root", "another"])
def test_no_file_is_read_that_others_could_have_written(
    mode: int, owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "rlhf_scan").mkdir()
    (tmp_path / "rlhf_scan").chmod(mode)
    status = (tmp_path / "rlhf_scan").stat()
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    made_by = {"this user": 1000, "root": 0, "another": 1001}[owner]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(Path, "stat", lambda self, **_: os.stat_result((*status[:4], made_by, *status[5:])))
    request.addfinalizer(cpu_disk_cache.directory.cache_clear)
    cpu_disk_cache.directory.cache_clear()
    found = cpu_disk_cache.directory()
    assert (found is not None) == (owner != "another" and mode in (0o700, 0o755))
    assert (found is not None) == (str(tmp_path) in cpu_backend.note())


@pytest.mark.parametrize(("mode", "owner", "is_read"), [(0o600, 0, True), (0o644, 0, True), (0o666, 0, False), (0o600, 1, False)])
def test_a_file_that_another_put_in_place_of_ours_is_not_read(
    mode: int, owner: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory was looked at when the process began."""
    monkeypatch.setattr(cpu_disk_cache, "directory", lambda: tmp_path)
    cpu_disk_cache._write("entry", b"payload")
    (tmp_path / "entry").chmod(mode)
    status = (tmp_path / "entry").stat()
    made_by = status.st_uid + owner
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((*status[:4], made_by, *status[5:])))
    assert cpu_disk_cache._read("entry") == (b"payload" if is_read else None)


def test_what_others_could_write_to_is_left_alone(filled: Path, tmp_path: Path, uncached: dict[str, Any]) -> None:
    cache = shutil.copytree(filled, tmp_path / "cache")
    (cache / "rlhf_scan").chmod(0o777)
    before = [file.name for file in files(cache)]
    compiled, bits = run(cache, "gae", "returns")
    assert compiled > 0
    assert bits == [uncached["gae"], uncached["returns"]]
    assert [file.name for file in files(cache)] == before


def test_a_function_that_another_process_may_know_by_its_symbol_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba's linker takes the first of a name: the other function would run."""
    monkeypatch.setattr(cpu_disk_cache, "directory", lambda: tmp_path)
    monkeypatch.setattr(cpu_disk_cache, "_known", {})

    @njit(no_cfunc_wrapper=True)
    def not_inlined(x: Any) -> Any:
        return x if x < 2 else not_inlined(x - 1) + not_inlined(x - 2)

    @cpu_compile.compiled_once()
    def calls_it(x: Any) -> Any:
        return not_inlined(x)

    @cpu_compile.compiled_once()
    def alone(x: Any) -> Any:
        return x + 1

    assert (calls_it(10), list(tmp_path.iterdir())) == (55, [])
    assert (alone(10), len(list(tmp_path.iterdir()))) == (11, 1)


@pytest.mark.parametrize("version", ["0.59.1", "0.99.0", "1.0.0rc1"])
def test_a_numba_that_was_not_read_compiles_in_each_process(
    version: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(cpu_compile.keeps.cache_clear)
    cpu_compile.keeps.cache_clear()
    monkeypatch.setattr("numba.__version__", version)
    function = cpu_compile.compiled_once()(lambda x: x + 1)
    assert not isinstance(function._cache, cpu_disk_cache.DiskCache)
    assert function(1) == 2
    assert "compiles in each process" in cpu_backend.note()


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(cpu_disk_cache, "directory", lambda: tmp_path)
    monkeypatch.setattr(os, "replace", full)
    cpu_disk_cache._write("entry", b"payload")
    assert list(tmp_path.iterdir()) == []
    assert cpu_disk_cache._read("entry") is None


def test_so_many_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_disk_cache, "directory", lambda: tmp_path)
    monkeypatch.setattr(cpu_disk_cache, "KEPT_FILES", 3)
    for i in range(5):
        cpu_disk_cache._write(f"{i}", b"payload %d" % i)
        os.utime(tmp_path / f"{i}", (i, i))
    assert [cpu_disk_cache._read(f"{i}") for i in range(5)] == [None, None, b"payload 2", b"payload 3", b"payload 4"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_sweep_made_again_in_one_process(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr(cpu_disk_cache, "directory", lambda: None)
        monkeypatch.setattr(cpu_disk_cache, "_known", {})
        cpu_sweep.compiled_sweep.cache_clear()
    rewards = torch.rand(3, 20)
    expected = gae(rewards, rewards, backend="cpu")
    for _ in range(3):
        cpu_sweep.compiled_sweep.cache_clear()
        assert all(torch.equal(*pair) for pair in zip(gae(rewards, rewards, backend="cpu"), expected, strict=True))


SOURCE = """
import math
import numpy as np
TABLE = (1.0, 2.0)
FACTOR = 2.0
def helper(x, y=3, *, z=4):
    return x * FACTOR + y - z
def formula(here, following, rates):
    if here[0] in (1, 2):
        return helper(here[0]) * TABLE[1] + np.float32(5), rates[0]
    return math.exp(here[0]), rates[0]
"""


def abs_of(x: Any) -> Any:
    return abs(x)


def fingerprint_of(source: str, **names: Any) -> str:
    scope: dict[str, Any] = {"__name__": "of_a_test"} | names
    exec(compile(source, f"{hashlib.sha256(source.encode()).hexdigest()}.py", "exec"), scope)
    return fingerprint(compiled_formula(scope["formula"], {}, compiled, np.float32))


def test_the_same_text_elsewhere_has_the_same_fingerprint() -> None:
    assert fingerprint_of(SOURCE) == fingerprint_of(SOURCE + "\n# more") == fingerprint_of("# above\n" + SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2.0)", "3.0)"),
        ("2.0)", "2)"),
        ("FACTOR = 2.0", "FACTOR = 2.5"),
        ("FACTOR = 2.0", "FACTOR = -0.0"),
        ("y=3", "y=5"),
        ("y=3", "y=3.0"),
        ("z=4", "z=True"),
        ("+ y", "- y"),
        ("(1, 2)", "(1, 3)"),
        ("np.float32", "np.float64"),
        ("import numpy", "import math"),
        ("math.exp", "math.log"),
        ("here[0] in", "here[1] in"),
    ],
)
def test_whatever_changes_the_code_changes_the_fingerprint(old: str, new: str) -> None:
    assert old in SOURCE
    assert fingerprint_of(SOURCE.replace(old, new)) != fingerprint_of(SOURCE)


def test_a_number_put_into_a_module_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import numpy as np\ndef formula(here, following, rates):\n    return here[0] * np.ours, rates[0]\n"
    found = []
    for number in (1.0, 2.0, 1.0):
        monkeypatch.setattr(np, "ours", number, raising=False)
        found.append(fingerprint_of(source))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("name", ["np.heaviside", "np.spacing"])
def test_a_function_that_a_user_taught_numba_is_not_known(name: str) -> None:
    """What it is compiled to can be another in the next process."""
    source = f"import numpy as np\ndef formula(here, following, rates):\n    return {name}(here[0]), rates[0]\n"
    fingerprint_of(source.replace(name, "np.sin"))
    function = getattr(np, name.removeprefix("np."))
    overload(function, strict=False)(lambda *arguments: lambda *arguments: 1.0)
    with pytest.raises(Unknown):
        fingerprint_of(source)


def test_settings_and_options_change_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Any) -> Any:
        return x

    plain = fingerprint(cpu_compile.inlined()(function))
    assert plain == fingerprint(cpu_compile.inlined()(function))
    assert plain != fingerprint(cpu_compile.inlined(fastmath={"contract"})(function))
    monkeypatch.setattr("numba.core.config.OPT", 2)
    assert plain != fingerprint(cpu_compile.inlined()(function))


@pytest.mark.parametrize(
    "helper",
    [np.ones(2), np.frompyfunc(abs, 1, 1), np.random, [1.0], torch.zeros(1), json, njit(abs_of)],
    ids=lambda helper: type(helper).__name__,
)
def test_what_numba_makes_of_something_else_is_not_known(helper: Any) -> None:
    with pytest.raises(Unknown):
        fingerprint_of("def formula(here, following, rates):\n    return other(here[0]), rates[0]\n", other=helper)
