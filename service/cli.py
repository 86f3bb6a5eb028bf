"""The command line: ``radixd serve``, ``radixd generate``, ``radixd chat``, ``radixd top``.

Whatever goes wrong on the way is one line on stderr, in terms of what the user wrote, and a non-zero exit: 2 for a
command that cannot be understood, 1 for one that cannot be done. Nothing heavy is imported before the command that
needs it runs.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from service import terminal
from service.errors import SettingError, StartError
from service.options import Kind, Number, OneOf, Policy, Switch, Target, Text, Whole, given_as, load_file
from service.settings import DEFAULT_TARGET, DEFAULTS, DEVICES, Settings
from service.visible import visible

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_STOPS = 32
_MAX_GRACE_SECONDS = 86_400
_INTERVAL = Number(0.1, 3600)
_SERVE_HELP = """\
Serves a model until SIGTERM or Ctrl-C.

A flag wins over its RADIXD_* variable, a variable over the --config file, and the file over the default shown here. The
file is TOML, and its keys are the flags without the dashes in front:

\b
  port = 50052
  cache = "naive"
  pool-tokens = 65536
  no-overlap = true
"""


def main() -> None:
    """The console script."""
    # The transport's own log would come between ours; what it has to say reaches us as errors.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    terminal.prepare_output()
    code = run(sys.argv[1:])
    terminal.finish_output()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit code."""
    try:
        code = cli.main(arguments, prog_name="radixd", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _complain(error.format_message())
        return error.exit_code
    except StartError as error:
        _complain(str(error))
        return 1
    except click.Abort:
        return 130
    except OSError as error:
        _complain(error.strerror or str(error))
        return 1
    except Exception as error:
        if os.environ.get("RADIXD_DEBUG"):
            raise
        _complain(f"a fault of radixd itself: {type(error).__name__}: {error} (RADIXD_DEBUG=1 shows where)")
        return 70
    return code if isinstance(code, int) else 0


def _complain(message: str) -> None:
    """One line, even where the message quotes what would make it more."""
    click.echo(f"radixd: {visible(message)}", err=True)


class _Command(click.Command):
    """A command that explains words it has no use for."""

    allow_extra_args = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        given = list(args)
        rest = super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            word = ctx.args[0]
            before = given[max(given.index(word) - 1, 0)]
            if before.startswith("--") and before != "--":
                raise click.UsageError(f"{before} takes no value: {word!r} is too much")
            hint = "put the prompt in quotes" if self.name == "generate" else f"{self.name} takes only flags"
            raise click.UsageError(f"unexpected argument {word!r}; {hint}")
        return rest


def _setting(flag: str, text: str, kind: Kind, metavar: str | None = None) -> Callable[[Any], Any]:
    """An option of ``serve``: flag, variable and file key share a name, and the default is that of Settings."""
    name = flag.removeprefix("--")
    default = DEFAULTS.get(name.replace("-", "_"))
    if isinstance(kind, OneOf):
        metavar = f"[{'|'.join(kind.choices)}]"
    elif metavar is None and not isinstance(kind, Policy):
        metavar = kind.name.upper()
    return click.option(
        flag,
        type=kind,
        metavar=metavar,
        envvar=f"RADIXD_{name.replace('-', '_').upper()}",
        show_envvar=True,
        default=default,
        show_default=default is not None,
        help=f"{text} {kind.allowed}".rstrip(),
    )


def _read_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None:
        load_file(context, path)


def _switch(flag: str, text: str, *, hidden: bool = False) -> Callable[[Any], Any]:
    variable = f"RADIXD_{flag.removeprefix('--').replace('-', '_').upper()}"
    return click.option(
        flag, is_flag=True, type=Switch(), envvar=variable, show_envvar=True, help=text, hidden=hidden
    )  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="radixd")
def cli() -> None:
    """Serves a large language model over gRPC, out of a radix-tree KV cache."""


@cli.command(cls=_Command, short_help="Serves a model until SIGTERM or Ctrl-C.", help=_SERVE_HELP)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="RADIXD_CONFIG",
    show_envvar=True,
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    metavar="FILE",
    help="TOML file with any of these settings.",
)
@_setting("--host", "Address to listen on; 0.0.0.0 or :: for every interface.", Text(), "ADDRESS")
@_setting("--port", "Port to listen on; 0 takes a free one.", Whole(0, 65535))
@_setting("--model", "smollm2, the path of a GGUF file, or org/repo:file.gguf on the Hugging Face hub.", Text())
@_setting("--device", "Where the model runs.", Text(), f"[{'|'.join(DEVICES)}]")
@_setting("--engine", "torch, or scripted:FILE to play a script instead of a model.", Text())
@_setting("--cache", "Prefix cache; naive keeps nothing.", OneOf("radix", "naive"))
@_setting("--eviction", "What the radix cache forgets first when pages run out.", Policy())
@_setting("--page-size", "Tokens in a page of the cache.", Whole(1, 1024))
@_setting("--pool-tokens", "Tokens in the whole page pool. Default: the engine's choice.", Whole(1))
@_setting("--context", "Prompt and output together, in tokens. Default: the model's own.", Whole(2))
@_setting("--max-running", "Sequences that may run at once.", Whole(1, 4096))
@_setting(
    "--max-waiting",
    "Sequences that may wait to run, and prompts that may wait to be tokenized; what comes beyond is refused.",
    Whole(1),
)
@_setting("--chunk-tokens", "Prompt tokens that one step computes at most.", Whole(1))
@_switch("--no-overlap", "Collect each step before the next is launched. Slower; the tokens are the same.")
@_switch("--deterministic", "", hidden=True)
@_setting("--dtype", "Type of activations and cache.", OneOf("auto", "float32", "bfloat16"))
@_setting("--threads", "Threads of the forward pass. Default: the engine's choice.", Whole(1, 1024))
@_setting("--max-message-mb", "Largest message either way, in MiB.", Whole(1, 2047))
@_setting(
    "--grace",
    "Seconds that running streams have to finish after SIGTERM or Ctrl-C; a second signal ends at once.",
    Number(0, _MAX_GRACE_SECONDS),
)
@click.pass_context
def serve(context: click.Context, /, no_overlap: bool, deterministic: bool, **values: Any) -> int:
    """Runs the server; _SERVE_HELP says what a user must know."""
    from service import server  # noqa: PLC0415
    from service.logs import configure  # noqa: PLC0415
    from service.replica import build_replica  # noqa: PLC0415
    from service.suggestion import suggestion  # noqa: PLC0415

    try:
        settings = Settings(overlap=not no_overlap, **values)
        _refuse_unserved(context, settings, deterministic)
        server.check_port(settings.host, settings.port)
    except SettingError as error:
        parameter = next(p for p in context.command.params if p.name == error.name)
        raise click.UsageError(f"{given_as(context, parameter, error.value)}: {error.problem}") from None
    replica = build_replica(settings)
    log = configure()

    def ready(port: int) -> None:
        name, address = replica.model.spec.name, server.join_address(settings.host, port)
        click.echo(f"radixd serves {name} on {address}; now run: {suggestion(settings, port)}")
        log.info("serving", model=name, address=address, pool_tokens=replica.model.pool_tokens)

    import uvloop  # noqa: PLC0415

    async def live() -> int:
        return await server.Server(replica, settings, log).serve(ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(live())


def _refuse_unserved(context: click.Context, settings: Settings, deterministic: bool) -> None:
    """Raises SettingError for what only the sources of the values, or this version, make impossible."""
    if deterministic:
        raise SettingError("deterministic", None, "not built yet")
    if settings.script and _wins(context, "model", "engine"):
        raise SettingError("model", settings.model, f"no model is loaded with --engine {settings.engine}")


def _wins(context: click.Context, name: str, other: str) -> bool:
    """Whether one setting was given on purpose and at least as strongly as another; a weaker one may be left over."""
    strength = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)
    one, two = context.get_parameter_source(name), context.get_parameter_source(other)
    return one in strength and (two not in strength or strength.index(one) <= strength.index(two))


def _check_stops(_: click.Context, __: click.Parameter, stops: tuple[str, ...]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise click.UsageError(f"--stop: may be given {MAX_STOPS} times at most, not {len(stops)}")
    return stops


def _target_option() -> Callable[[Any], Any]:
    return click.option(
        "--target",
        type=Target(),
        metavar="HOST:PORT",
        envvar="RADIXD_TARGET",
        show_envvar=True,
        default=DEFAULT_TARGET,
        show_default=True,
        help="Where the server listens.",
    )


def _reply_options(command: Callable[..., int]) -> Callable[..., int]:
    """The options that ``generate`` and ``chat`` share."""
    temperature = Number(0, 100)
    for option in (
        click.option("--stop", type=Text(1, 1024), multiple=True, callback=_check_stops, metavar="TEXT",
                     help="Text to stop before; may be given more than once."),
        click.option("--seed", type=Whole(0, 2**64 - 1), help="Makes the same call draw the same tokens."),
        click.option("--temperature", type=temperature,
                     help=f"0 is greedy. {temperature.allowed} Default: the model's own."),
        click.option("--max-tokens", type=Whole(1, 2**32 - 1), help="Default: up to the context's end."),
        _target_option(),
    ):  # fmt: skip
        command = option(command)
    return command


@cli.command(cls=_Command, short_help="Streams one reply of a running server.")
@click.argument("prompt", type=Text(0))
@_reply_options
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text, instead of answering it as a chat turn.")
def generate(prompt: str, target: str, raw: bool, **options: Any) -> int:
    """Streams what a running server makes of PROMPT; - reads it from standard input.

    The text goes to standard output; tokens, cache hits and speed go to standard error, last.
    """
    text = terminal.read_all() if prompt == "-" else prompt
    if not text:
        raise click.UsageError("standard input is empty" if prompt == "-" else "the prompt is empty")
    from service.client import Client, Options  # noqa: PLC0415

    with Client(target) as client:
        return client.generate(text, Options(**options), raw=raw)


@cli.command(cls=_Command, short_help="Talks with a running server.")
@_reply_options
@click.option("--system", type=Text(0), help="A system message to begin with.")
def chat(target: str, system: str | None, **options: Any) -> int:
    """Talks with a running server; shows after each reply how much of the history came from the cache.

    Ctrl-C ends a reply; at the prompt it leaves, as Ctrl-D does. /help lists what else may be typed there.
    """
    from service.client import Client, Options  # noqa: PLC0415
    from service.conversation import Conversation  # noqa: PLC0415

    with Client(target) as client:
        return Conversation(client, Options(**options), system).run()


@cli.command(cls=_Command, short_help="Watches a running server's cache.")
@_target_option()
@click.option(
    "--interval",
    type=_INTERVAL,
    default=1.0,
    show_default=True,
    help=f"Seconds between two looks. {_INTERVAL.allowed}",
)
@click.option("--once", is_flag=True, help="Look once and print it as plain text, as where the output is no terminal.")
def top(target: str, interval: float, once: bool) -> int:
    """Watches a running server: its pages, its speed, and the prefixes that requests share most. Ctrl-C leaves.

    It shows what others sent to the server.
    """
    from service.client import Client  # noqa: PLC0415
    from service.top import Top  # noqa: PLC0415

    with Client(target) as client:
        return Top(client).run(interval, once=once)
