"""The `serve` command: parse, call, print."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, CycloptsPanel, Parameter, UnknownOptionError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compress.errors import MissingExtraError, ResourceError, ToolkitError, printable
from compress.vetting.printed import print_any_name
from serve import __version__
from serve.cli.deploy import deploy
from serve.cli.doctor import doctor
from serve.cli.gateway import gateway, settings_of_file
from serve.cli.hooks import hooks
from serve.cli.keys import keys
from serve.cli.load import load
from serve.cli.measure import tune, verify
from serve.cli.models import models
from serve.cli.plan import plan
from serve.cli.rollout import rollout
from serve.cli.triton import triton
from serve.config.merge import Edits
from serve.gateway.settings import Settings
from serve.gateway.settings_file import PREFIX
from serve.pack.file import flags_of_file, read_tables
from serve.pack.options import PackOptions
from serve.up.options import UpOptions

if TYPE_CHECKING:
    from serve.up.run import Started

__all__ = ["app", "main"]


def _refusal(err: CycloptsError) -> object:
    """What is wrong with a flag, or with a file, whose values it quotes; of a setting of the gateway, where `serve up`
    takes it from.
    """
    told = printable(str(err), keep="\n")
    if isinstance(err, UnknownOptionError) and list(err.command_chain or ())[:1] == ["up"]:
        name = (err.token.keyword or "").removeprefix("--").removeprefix("no-").replace("-", "_")
        if name in {each.name for each in dataclasses.fields(Settings)}:
            told += (
                f"\nIt is a setting of the gateway: write {name} = … into a TOML file and name that by --gateway, "
                f"or set {PREFIX}{name.upper()}."
            )
    return CycloptsPanel(told)


app = App(
    name="serve",
    help="Serve a compressed model with Triton, behind a gateway, and load-test it.",
    version=__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    error_formatter=_refusal,
)
app.config = (flags_of_file, settings_of_file)
app.command(gateway)
app.command(keys)
app.command(models)
app.command(rollout)
app.command(hooks)
app.command(load)
app.command(deploy)
app.command(doctor)
app.command(plan)
app.command(triton)
app.command(tune)
app.command(verify)
out = Console(highlight=False, soft_wrap=True)
Flat = Parameter(name="*")
# What a disk or a folder says of itself, whoever reads or writes there; other errors of the system are ours.
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
ROOM = "make room there, or see that you may read and write it"
OPTIONAL = (
    "fastapi", "fastapi_offline", "grpc", "httptools", "orjson", "prometheus_client", "psutil", "tritonclient",
    "uvicorn", "uvloop",
)  # fmt: skip


@app.command
def pack(
    artifact: Path,
    *,
    repository: Path,
    name: str,
    hooks: Path | None = None,
    keep: int = 3,
    edits: Edits = "merge",
    config: Path | None = None,
    input_: Annotated[tuple[str, ...], Parameter(name="--input")] = (),
    output: Annotated[tuple[str, ...], Parameter(name="--output")] = (),
    text: bool | None = None,
    text_pair: bool | None = None,
    image: bool = False,
    options: Annotated[PackOptions | None, Flat] = None,
) -> None:
    """Write an artifact into a Triton model repository.

    With hooks it becomes an ensemble: NAME is preprocess, the network and postprocess, one after the other. Where the
    same inputs and outputs were packed under that name before, a further version is added, which a running Triton
    serves when it is told to load the model; otherwise what was there is replaced as a whole. Other models are left
    alone.

    Parameters
    ----------
    artifact
        The folder that `compress export` wrote, or a file: ONNX, TensorRT plan, TorchScript, AOTInductor package.
    repository
        The model repository; made if it isn't there.
    name
        What clients ask for.
    hooks
        A Python file with preprocess and/or postprocess.
    keep
        How many versions may stand beside each other; 1 replaces what was there.
    edits
        What becomes of changes made by hand in config.pbtxt since the last pack: merge them, prefer them, drop them.
    config
        A TOML file with a key for each flag here, which flags override, and with any field of Triton's own model
        configuration in the tables [network], [preprocess], [postprocess], [ensemble] and [pipeline].
    input_
        Of a TensorRT plan or TorchScript file, which don't tell: each tensor as in x:float32[batch,3,224,224].
    output
        The same for what it gives.
    text
        Let it take texts: tokens are made of them by the tokenizer that came with the model, and the answer is its
        embeddings, or a label and scores. By default where that can be done and no hooks are given.
    text_pair
        Let it take two texts a sample. By default where the model was exported with --text-pair-column.
    image
        Let it take image files (PNG, JPEG): they are resized, cut and scaled as the image processor says that came with
        the model, and the answer is a label and its probability.
    """
    from compress.artifact import Signature, TensorSpec
    from serve.pack.write import pack as run
    from serve.up.claim import served_by

    signature = None
    if input_ or output:
        signature = Signature(tuple(map(TensorSpec.parse, input_)), tuple(map(TensorSpec.parse, output)))
    options = options or PackOptions()
    if config is not None:
        options = dataclasses.replace(options, models=read_tables(config)[1])
    packed = run(
        artifact,
        repository=repository,
        name=name,
        hooks=hooks,
        options=options,
        keep=keep,
        edits=edits,
        signature=signature,
        text=text,
        text_pair=text_pair,
        image=image,
    )
    out.print(f"wrote version {packed.version} of {', '.join(packed.models)} into {repository}")
    for warning in packed.warnings:
        out.print(f"[yellow]![/] {escape(warning)}")
    for field in packed.kept:
        out.print(f"kept your edit of {escape(field)}")
    if packed.dropped:
        out.print(f"dropped version {', '.join(map(str, packed.dropped))}")
    if packed.removed:
        out.print(f"removed {', '.join(packed.removed)}, which the earlier pack had written")
    for kind, tensors in (("takes", packed.inputs), ("gives", packed.outputs)):
        shown = ", ".join(f"{t.name} {t.data_type.removeprefix('TYPE_')}{list(t.dims)}" for t in tensors)
        out.print(f"  {packed.name} {kind} {shown}", markup=False)
    load = f"serve models load {name}"
    if served := served_by(repository):
        out.print(f"{escape(served)} serves the repository already; where that has --model-control: {load}")
        out.print(f"otherwise end it, then: serve up {repository}")
        return
    out.print(f"serve it with: serve up {repository}")
    if packed.version > 1:
        out.print(f"or, where it is served with --model-control: {load}")


@app.command
def lint(
    repository: Path,
    *,
    container: bool = False,
    tensorrt: str | None = None,
    memory: str | None = None,
    pin: tuple[str, ...] = (),
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Say what Triton would refuse or do badly in a repository, before it starts; exit code 1 when it would refuse.

    Parameters
    ----------
    repository
        A model repository; nothing in it is run or changed.
    container
        It is for a Triton elsewhere: this machine's backends, GPUs, cores and packages say nothing.
    tensorrt
        The TensorRT of that Triton, such as 10.5: plans that it can't load are found. Implies --container.
    memory
        It is for `serve up --memory` of this size, such as 8GiB: models that never fit are found.
    pin
        With --memory, a model that is to stay loaded; may be given again.
    json_
        Print a list of {model, severity, what, mend}.
    """
    from serve.lint.finding import shown
    from serve.lint.plan_rules import version_of
    from serve.lint.run import lint as run
    from serve.up.memory import bytes_of, check_flags
    from serve.up.memory_rules import memory_findings

    version = version_of(tensorrt) if tensorrt else None
    check_flags(memory, pin)
    found = run(repository, container=container or version is not None, tensorrt=version)
    if memory is not None:
        found = sorted([*found, *memory_findings(repository, bytes_of(memory), pin)], key=lambda each: each.severity)
    if json_:
        print(json.dumps([finding.to_dict() for finding in found], indent=2))
    else:
        for finding in found:
            colour = "red" if finding.severity == "error" else "yellow"
            model, what = escape(shown(finding.model)), escape(shown(finding.what))
            out.print(f"[bold]{model}[/] [{colour}]{finding.severity}[/]: {what}")
            out.print(f"  mend: {shown(finding.mend)}", markup=False)
        counts = [sum(finding.severity == kind for finding in found) for kind in ("error", "warning")]
        out.print(f"{counts[0]} errors, {counts[1]} warnings" if found else "nothing to mend")
    if any(finding.severity == "error" for finding in found):
        sys.exit(1)


@app.command
def up(repository: Path | None = None, *, options: Annotated[UpOptions | None, Flat] = None) -> None:
    """Start Triton on a model repository, and the gateway in front of it; Ctrl-C or SIGTERM drains both.

    A Triton that dies is started again; the gateway answers 503 meanwhile.

    Parameters
    ----------
    repository
        What `serve pack` wrote.
    """
    from serve.up.run import up as run

    options = options or UpOptions()
    if options.docker == "print" and repository is not None:
        from serve.repository.read import read_models
        from serve.up.container import container_command

        print(shlex.join(container_command(repository, read_models(repository), options)))
        return
    run(repository, options, on_ready=_show, on_event=lambda text: out.print(text, markup=False))
    out.print("stopped")


CLOSED = "none: grpc_port in --gateway's file or SERVE_GATEWAY_GRPC_PORT=8081 opens one"


def _show(started: Started) -> None:
    if started.seconds:
        out.print(f"Triton is ready after {started.seconds:.1f} s")
    configs = {model.name: model.config for model in started.models}
    table = Table("model", "runs on", "version", "state", "instances", "ask it at")
    for row in started.loaded:
        config = configs.get(row.name)
        kind = (config.platform or config.backend) if config else ""
        count = sum(group.count for group in config.instance_group) if config else 0
        part = config is not None and config.parameters.get("part_of", row.name) != row.name
        policy = None if config is None else config.model_transaction_policy
        stream = "/stream" if policy is not None and policy.decoupled else ""
        url = "" if part else f"{started.gateway}/predict/{row.name}{stream}"
        table.add_row(row.name, kind, row.version, row.state, str(count) if count else "", url)
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)
    for name, address in (("Triton", started.triton), *started.endpoints):
        out.print(f"{name:<13} {address}   (this machine only, past the gateway)")
    if started.cores:
        out.print(f"{'cores':<13} {started.cores}", markup=False)
    if started.log is not None:
        out.print(f"{'log':<13} {started.log}")
    for text in started.warnings:
        out.print(f"[yellow]![/] {escape(text)}")
    out.print(f"{'gateway':<13} {started.gateway}   try it: {started.gateway}/docs")
    out.print(f"{'gateway gRPC':<13} {started.grpc or CLOSED}")
    out.print("Ctrl-C stops both" if started.seconds else "Ctrl-C stops the gateway")


@app.command
def sign(repository: Path, *, key: Path) -> None:
    """Sign a model repository as it is: `serve up --public-key` then serves nothing else.

    Parameters
    ----------
    repository
        What `serve pack` wrote; the signature is written into it.
    key
        A private key (PEM) of P-256, P-384 or P-521 for model.sig, in OpenSSF's format: openssl genpkey -algorithm EC
        -pkeyopt ec_paramgen_curve:P-256 -out key.pem; or an Ed25519 key for SHA256SUMS and SHA256SUMS.sig
    """
    from serve.repository.signing import sign as run

    out.print(f"signed {run(repository, key)} files")


@app.command
def check(repository: Path, *, public_key: Path | None = None, into: Path | None = None) -> None:
    """Check a repository's files against the checksums of `serve pack`, and against a signature; run nothing.

    Parameters
    ----------
    repository
        A model repository.
    public_key
        Of whoever signed it (`serve sign`).
    into
        A folder for a copy of it, made as it is read: what a server is given there is what was verified. It is empty,
        or holds an earlier copy, which is replaced.
    """
    from serve.repository.signing import check_files

    out.print(
        f"{check_files(repository, public_key, into=into)} files are what was {'signed' if public_key else 'packed'}"
    )


@app.command
def infer(file: Path, *others: Path, model: str, url: str = "http://127.0.0.1:8080", timeout: float = 30.0) -> None:
    """Send a file to a model and print the answer as JSON; of several files a line each, as they are answered.

    Parameters
    ----------
    file
        An image or any other file for a model that takes bytes; a .json file holds values by input name.
    others
        Further files, asked one after the other.
    model
        Which model to ask.
    url
        The gateway. A key for it is taken from the environment's SERVE_API_KEY.
    timeout
        For the answer, in seconds.
    """
    from serve.http.ask import infer_file

    for each in (file, *others):
        answer = infer_file(url, model, each, timeout_s=timeout, key=os.environ.get("SERVE_API_KEY", ""))
        if others:
            print(json.dumps({"file": str(each), **answer}, ensure_ascii=False), flush=True)
        else:
            print(json.dumps(answer, indent=2, ensure_ascii=False))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a user's mistake ends with three lines and exit code 2."""
    print_any_name()
    os.environ["PYTHONSAFEPATH"] = "1"  # no process that starts here takes modules out of the current folder
    try:
        app(arguments, exit_on_error=False)
    except CycloptsError:
        sys.exit(2)
    except ToolkitError as err:
        print(f"error: {err}", file=sys.stderr)
        sys.exit(err.exit_code)
    except OSError as err:
        if err.errno not in REFUSED:
            raise
        what = f"can't use {err.filename or 'a file'}"
        print(f"error: {ResourceError(what, why=err.strerror or str(err), mend=ROOM)}", file=sys.stderr)
        sys.exit(ResourceError.exit_code)
    except ModuleNotFoundError as err:
        if err.name is None or err.name.partition(".")[0] not in OPTIONAL:
            raise
        missing = MissingExtraError("can't serve", module=err.name, extra="serve")
        print(f"error: {missing}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
