"""The command line: ``radixd serve``, ``radixd generate``, ``radixd chat``.

Whatever goes wrong on the way is one line on stderr and a non-zero exit. Nothing heavy is imported before the command
that needs it runs.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from service.errors import StartError
from service.settings import DEFAULTS, Settings, read_file

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_TARGET = "127.0.0.1:50051"


def main() -> None:
    """The console script."""
    # The transport's own log would come between ours; what it has to say reaches us as errors.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit code."""
    try:
        code = cli.main(arguments, prog_name="radixd", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"radixd: {error.format_message()}", err=True)
        return error.exit_code
    except StartError as error:
        click.echo(f"radixd: {error}", err=True)
        return 1
    except click.Abort:
        return 130
    return code if isinstance(code, int) else 0


def _setting(flag: str, text: str, **kwargs: Any) -> Callable[[Any], Any]:
    """An option of ``serve``: flag, variable and file key share a name, and the default is that of Settings."""
    name = flag.removeprefix("--")
    default = DEFAULTS.get(name.replace("-", "_"))
    return click.option(
        flag,
        envvar=f"RADIXD_{name.replace('-', '_').upper()}",
        show_envvar=True,
        default=default,
        show_default=default is not None,
        help=text,
        **kwargs,
    )


def _read_config(context: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        known = {parameter.name for parameter in context.command.params if parameter.name} - {"config"}
        context.default_map = read_file(path, known)
    return path


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="radixd")
def cli() -> None:
    """Serves a large language model over gRPC, out of a radix-tree KV cache."""


@cli.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="RADIXD_CONFIG",
    show_envvar=True,
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="TOML file with any of these settings, named as here without the dashes in front.",
)
@_setting("--host", "Address to listen on; 0.0.0.0 or :: for every interface.")
@_setting("--port", "Port to listen on; 0 takes a free one.", type=click.IntRange(0, 65535))
@_setting("--model", "smollm2, the path of a GGUF file, or org/repo:file.gguf on the Hugging Face hub.")
@_setting("--device", "Where the model runs; cuda is not built yet.", type=click.Choice(["auto", "cpu", "cuda"]))
@_setting("--engine", "torch, or scripted:FILE to play a script instead of a model.")
@_setting("--cache", "Prefix cache; naive keeps nothing.", type=click.Choice(["radix", "naive"]))
@_setting("--page-size", "Tokens in a page of the cache.", type=click.IntRange(1, 1024))
@_setting("--pool-tokens", "Tokens in the whole page pool. Default: the engine's choice.", type=click.IntRange(1))
@_setting("--context", "Prompt and output together, in tokens. Default: the model's own.", type=click.IntRange(2))
@_setting("--max-running", "Sequences that may run at once.", type=click.IntRange(1, 4096))
@_setting("--max-waiting", "Sequences that may wait at once; more are refused.", type=click.IntRange(1))
@_setting("--chunk-tokens", "Prompt tokens that one step computes at most.", type=click.IntRange(1))
@click.option(
    "--no-overlap",
    is_flag=True,
    envvar="RADIXD_NO_OVERLAP",
    show_envvar=True,
    help="Collect each step before the next is launched. Slower; the tokens are the same.",
)
@_setting("--dtype", "Type of activations and cache.", type=click.Choice(["auto", "float32", "bfloat16"]))
@_setting("--threads", "Threads of the forward pass. Default: the engine's choice.", type=click.IntRange(1))
@_setting("--max-message-mb", "Largest message either way, in MiB.", type=click.IntRange(1, 2047))
@_setting(
    "--grace",
    "Seconds that running streams have to finish after SIGTERM or Ctrl-C; a second signal ends at once.",
    type=click.FloatRange(0),
)
def serve(no_overlap: bool, **values: Any) -> int:
    """Serves a model until SIGTERM or Ctrl-C.

    Settings come from flags, then RADIXD_* variables, then the --config file, then the defaults shown here.
    """
    settings = Settings(overlap=not no_overlap, **values)
    from service import server  # noqa: PLC0415
    from service.logs import configure  # noqa: PLC0415
    from service.replica import build_replica  # noqa: PLC0415

    server.check_port(settings.host, settings.port)
    replica = build_replica(settings)
    log = configure()

    def ready(port: int) -> None:
        address = server.join_address(settings.host, port)
        target = "" if address == DEFAULT_TARGET else f" --target {address}"
        click.echo(
            f'radixd serves {replica.model.spec.name} on {address}; now run: {_command()} generate{target} "Hello"'
        )
        log.info("serving", model=replica.model.spec.name, address=address, pool_tokens=replica.model.pool_tokens)

    import uvloop  # noqa: PLC0415

    async def live() -> int:
        return await server.Server(replica, settings, log).serve(ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(live())


def _command() -> str:
    """How the user can call radixd from where they are: its environment need not be on PATH."""
    called = Path(sys.argv[0])
    if shutil.which("radixd") or called.name != "radixd":
        return "radixd"
    return str(called.relative_to(Path.cwd()) if called.is_relative_to(Path.cwd()) else called)


_TARGET = click.option(
    "--target", envvar="RADIXD_TARGET", show_envvar=True, default=DEFAULT_TARGET, show_default=True,
    help="Where the server listens.",
)  # fmt: skip


def _sampling_options(command: Callable[..., int]) -> Callable[..., int]:
    """The options that ``generate`` and ``chat`` share."""
    for option in (
        click.option("--stop", multiple=True, help="Text to stop before; may be given more than once."),
        click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Makes the same call draw the same tokens."),
        click.option("--temperature", type=float, help="0 is greedy. Default: the model's own."),
        click.option("--max-tokens", type=click.IntRange(1, 2**32 - 1), help="Default: up to the context's end."),
        _TARGET,
    ):
        command = option(command)
    return command


@cli.command()
@click.argument("prompt")
@_sampling_options
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text, instead of answering it as a chat turn.")
def generate(prompt: str, target: str, raw: bool, **options: Any) -> int:
    """Streams what a running server makes of PROMPT; - reads it from standard input.

    The text goes to standard output; tokens, cache hits and speed go to standard error, last.
    """
    from service.client import Client, Options  # noqa: PLC0415

    text = sys.stdin.read() if prompt == "-" else prompt
    with Client(target) as client:
        return client.generate(text, Options(**options), raw=raw)


@cli.command()
@_sampling_options
@click.option("--system", help="A system message to begin with.")
def chat(target: str, system: str | None, **options: Any) -> int:
    """Talks with a running server; shows after each reply how much of the history came from the cache.

    Ctrl-C ends a reply; at the prompt it leaves, as Ctrl-D does.
    """
    from service.client import Client, Options  # noqa: PLC0415

    with Client(target) as client:
        return client.chat(Options(**options), system=system)
