"""What imports what, what the wheel holds, and how large files and functions are."""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_scan import __version__

ROOT = Path(__file__).resolve().parent.parent
DOORS = ("server", "ray_actors", "integrations")
MAPPED = (*DOORS, "benchmarks")  # folders that the wheel holds inside rlhf_scan
SOURCES = sorted(path for folder in ("rlhf_scan", *MAPPED) for path in (ROOT / folder).rglob("*.py"))
# What `import rlhf_scan` must do without, on top of the standard library: everything but torch.
OPTIONAL = (
    "triton",
    "numba",
    "fastapi",
    "uvicorn",
    "ray",
    "trl",
    "transformers",
    "safetensors",
    "httpx",
    "typer",
    "rich",
    "orjson",
    "pydantic",
    "prometheus_client",
)
LONGEST_FILE, LONGEST_FUNCTION = 300, 60

BLOCK = """
import sys

class Blocked:
    def __init__(self, names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

"""


def run_without(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter where `blocked` cannot be imported."""
    program = BLOCK + f"sys.meta_path.insert(0, Blocked({blocked!r}))\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


USE = """
import os, torch, torch._dynamo
for blocked in {cases}:
    if os.fork() == 0:
        sys.meta_path[0] = Blocked(blocked)
        import rlhf_scan
        result = rlhf_scan.gae(torch.tensor([0.0, 1.0]), torch.zeros(2), gamma=0.5, lam=1.0, backend="reference")
        print("-".join(blocked), result.advantages.tolist(), flush=True)
        os._exit(0)
    os.wait()
"""
CASES = [*((name,) for name in OPTIONAL), OPTIONAL]


@pytest.fixture(scope="module")
def without() -> subprocess.CompletedProcess[str]:
    """What a process says that has imported torch alone, and then, for each of CASES in a copy of it, uses the library without those."""
    return run_without(OPTIONAL, USE.format(cases=CASES))


@pytest.mark.parametrize("blocked", CASES, ids=lambda names: names[0] if len(names) == 1 else "all")
def test_the_library_needs_torch_alone(without: subprocess.CompletedProcess[str], blocked: tuple[str, ...]) -> None:
    assert f"{'-'.join(blocked)} [0.5, 1.0]" in without.stdout.splitlines(), without.stderr


def test_the_library_imports_no_optional_package() -> None:
    # torch itself imports triton where it is there.
    code = f"import rlhf_scan; print([name for name in {OPTIONAL} if name in sys.modules])"
    done = run_without(("triton",), code)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(("backend", "package"), [("cpu", "numba"), ("auto", "numba"), ("triton", "triton")])
def test_a_backend_whose_package_is_missing_says_so(backend: str, package: str) -> None:
    done = run_without(
        (package,),
        f"""
        import torch, rlhf_scan
        try:
            rlhf_scan.gae(torch.ones(2), torch.zeros(2), backend={backend!r})
        except rlhf_scan.BackendError as error:
            print(error)
        """,
    )
    assert done.returncode == 0, done.stderr
    chosen = "cpu" if backend == "auto" else backend
    assert done.stdout.startswith(f"gae: backend '{chosen}' needs {package}, which is not installed; install it or choose another backend")


def imports(tree: ast.AST) -> Iterator[str]:
    """The absolute names that the code of `tree` imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_module_level(tree: ast.Module) -> ast.Module:
    """`tree` without what runs later, or for type checkers alone."""

    class Now(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    return ast.fix_missing_locations(Now().visit(copy.deepcopy(tree)))


def door_of(name: str) -> str | None:
    """Which door the module `name` belongs to."""
    head, *rest = name.split(".")
    inside = rest[0] if head == "rlhf_scan" and rest else head
    return inside if inside in DOORS else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_doors_keep_to_themselves(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    tree = ast.parse(path.read_text())
    if folder in DOORS:
        # Their own modules are imported relatively, since the folder has another name in the repository.
        assert [name for name in imports(tree) if door_of(name)] == []
        deep = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level > 1]
        assert [ast.unparse(node) for node in deep] == []
    else:
        assert [name for name in imports(at_module_level(tree)) if door_of(name)] == []


def test_only_the_commands_that_serve_import_a_door() -> None:
    importing = {path.name for path in (ROOT / "rlhf_scan").rglob("*.py") if any(map(door_of, imports(ast.parse(path.read_text()))))}
    assert importing == {"cli.py", "demo.py"}


def test_the_scans_of_this_file_find_what_they_look_for() -> None:
    tree = ast.parse(
        "import ray\nif TYPE_CHECKING:\n    import a\ndef f():\n    from rlhf_scan.server import app\nclass C:\n    import rlhf_scan.server.x"
    )
    assert set(imports(tree)) == {"ray", "a", "rlhf_scan.server.app", "rlhf_scan.server.x"}
    assert set(imports(at_module_level(tree))) == {"ray", "rlhf_scan.server.x"}
    assert [door_of(name) for name in ("rlhf_scan.server.x", "ray_actors", "rlhf_scan.engine", "ray")] == [
        "server",
        "ray_actors",
        None,
        None,
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    assert path.stem not in ("utils", "helpers", "common")
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    too_long = {node.name: lines_of_body(node) for node in functions if lines_of_body(node) > LONGEST_FUNCTION}
    assert too_long == {}


def lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From the first statement after the docstring to the last line."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    last = function.end_lineno
    assert last is not None
    return last - body[0].lineno + 1 if body else 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the sources, so that the build leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
    wanted = ("rlhf_scan", *MAPPED, "pyproject.toml", "README.md", "LICENSE")
    for name in names:
        if name.split("/")[0] in wanted and "__pycache__" not in name and (ROOT / name).exists():
            target = folder / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", "out", "./source"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (folder / "out").glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_source_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    info = f"rlhf_scan-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"rlhf_scan", info}
    sources = {str(path.relative_to(ROOT)) for path in SOURCES}
    expected = {name if name.startswith("rlhf_scan/") else f"rlhf_scan/{name}" for name in sources}
    assert {name for name in names if name.endswith(".py")} == expected
    others = {name for name in names if not name.endswith(".py") and not name.startswith(info)}
    data = {f"rlhf_scan/data/{path.name}" for path in (ROOT / "rlhf_scan" / "data").iterdir() if path.is_file()}
    assert others == {"rlhf_scan/py.typed", *data}
    assert f"{info}/licenses/LICENSE" in names


def test_the_wheel_works_where_it_is_unpacked(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    code = f"""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
    sys.path.insert(0, {str(tmp_path / "site")!r})
    import rlhf_scan.server, rlhf_scan.ray_actors, rlhf_scan.integrations, rlhf_scan.backends
    from rlhf_scan.rollout import read_request
    from rlhf_scan.demo import ROLLOUT
    from rlhf_scan.server import create_app
    print(rlhf_scan.__file__, rlhf_scan.server.__file__, read_request(ROLLOUT).op)
    """
    done = subprocess.run([sys.executable, "-c", "import sys\n" + textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site" / "rlhf_scan"
    assert done.stdout.split() == [str(site / "__init__.py"), str(site / "server" / "__init__.py"), "gae"]
