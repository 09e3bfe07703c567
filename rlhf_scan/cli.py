"""The command line: `rlhf-scan compute | serve | doctor | demo | bench`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from torch import Tensor

from . import doctor as doctor_report
from .engine import LocalEngine
from .errors import InputError, RlhfScanError
from .requests import CreditResult
from .rollout import device_for, on_device, read_request, write_result
from .version import __version__

app = typer.Typer(
    help="Credit assignment for RLHF: GAE, returns and scans over rollout files.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Imported first, to register estimators; here or installed; repeatable."),
]


def main() -> None:
    """Run the command line; an error that rlhf_scan raises on purpose is one line on stderr and exit code 2."""
    try:
        app()
    except RlhfScanError as error:
        print(f"rlhf-scan: {error}", file=sys.stderr)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rlhf-scan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command()
def compute(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Rollout file (safetensors).")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Where the result goes (safetensors).")],
    op: Annotated[str | None, typer.Option(help="Estimator to run instead of the one that the file names.")] = None,
    param: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Parameter, instead of the file's; repeatable.")] = None,
    backend: Annotated[str, typer.Option(help="auto, triton, cpu or reference.")] = "auto",
    force: Annotated[bool, typer.Option(help="Overwrite OUT.")] = False,
    imports: Imports = None,
) -> None:
    """Run the request in a rollout file and write its result."""
    _import("compute", imports)
    if output.exists() and source.exists() and output.samefile(source):
        raise InputError(f"compute: OUT must not be IN, got {output} as both; name another file")
    if output.exists() and not force:
        raise InputError(f"compute: OUT must not exist yet, got {output}; name another file or pass --force")
    request = read_request(source, op=op, params=_parameters(param or []))
    result = LocalEngine(backend, validate="full").run(on_device(request, device_for(backend)))
    write_result(result, output)
    print(_summary(request.op, result))
    print(f"wrote {output}")


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on [RLHF_SCAN_HOST; 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one [RLHF_SCAN_PORT; 8000].")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, triton, cpu or reference [RLHF_SCAN_BACKEND; auto].")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads that compute [RLHF_SCAN_THREADS; 2].")] = None,
    queue: Annotated[int | None, typer.Option(help="Requests admitted at once, 503 beyond [RLHF_SCAN_QUEUE; 64].")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Largest body, 413 beyond [RLHF_SCAN_MAX_BODY_BYTES; 256 MiB].")] = None,
    max_json_bytes: Annotated[int | None, typer.Option(help="Largest JSON body, 413 beyond [RLHF_SCAN_MAX_JSON_BYTES; 64 MiB].")] = None,
    body_seconds: Annotated[float | None, typer.Option(help="How long a body may take, 408 beyond [RLHF_SCAN_BODY_SECONDS; 60].")] = None,
    warm: Annotated[str | None, typer.Option(metavar="OP,OP", help="Compiled before the service is ready [RLHF_SCAN_WARM; gae].")] = None,
    imports: Imports = None,
) -> None:
    """Serve every operation over HTTP, until interrupted; an option left out is what the environment says, or its default."""
    given = {name: value for name, value in locals().items() if value is not None and name != "imports"}
    _import("serve", imports)
    with _needs("server"):
        from rlhf_scan.server import serving
    serving.serve(serving.Settings.from_environment(**given))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, imports: Imports = None) -> None:
    """Say what runs here, and test each usable backend against the reference; exit code 1 if a test fails."""
    _import("doctor", imports)
    report = doctor_report.examine()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        doctor_report.show(report, Console())
    if not report["ok"]:
        raise typer.Exit(1)


@app.command()
def demo() -> None:
    """Serve, send a recorded rollout, check the answer and sum it up."""
    with _needs("server"):
        from .demo import main as run_demo
    run_demo()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Time every estimator and its peers here; `rlhf-scan bench --help` lists the options."""
    from rlhf_scan.benchmarks.command import main as run_benchmarks

    run_benchmarks(context.args, "rlhf-scan bench")


@contextmanager
def _needs(extra: str) -> Iterator[None]:
    """Turn a missing optional package into an error that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise RlhfScanError(f"this command needs {error.name}, which is not installed; run pip install 'rlhf-scan[{extra}]'") from error


def _import(command: str, modules: list[str] | None) -> None:
    """Import the user's modules, which register what they add; they may lie in the current directory, as for ``python -m``."""
    if modules and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for module in modules or []:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever the module raises
            remedy = "name it as in an import statement, and run where it lies or install it"
            if not (isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(f"{error.name}.")):
                remedy = "mend it"
            raise InputError(
                f"{command}: --import must name a module that can be imported, got {module!r}: {type(error).__name__}: {error}; {remedy}"
            ) from error


def _parameters(texts: list[str]) -> dict[str, str]:
    parameters: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"compute: --param must be NAME=VALUE, got {text!r}; write it like gamma=0.99")
        parameters[name] = value
    return parameters


def _summary(op: str, result: CreditResult) -> str:
    report = result.report
    head = f"{op}: {report['segments']} segments, {report['tokens']} tokens, backend {report['backend']}, {report['milliseconds']} ms"
    return "\n".join([head, *(f"  {name}: {_statistics(tensor)}" for name, tensor in result.tensors.items())])


def _statistics(tensor: Tensor) -> str:
    shape = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not tensor.numel():
        return shape
    numbers = tensor.double()
    return f"{shape}, mean {numbers.mean():.6g}, min {numbers.min():.6g}, max {numbers.max():.6g}"
