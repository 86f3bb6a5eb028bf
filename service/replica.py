"""One model replica, built from settings: engine, cache, scheduler and tokenizer.

Every reason why it cannot be built becomes a StartError of one line, here; the model's own packages (torch among them)
are imported here as well, so that commands which serve nothing start fast.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.settings import SchedulerSettings
from service.errors import StartError
from service.model import ServedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.base import Engine
    from kvcache.base import PrefixCache
    from scheduler.scheduler import Scheduler
    from service.settings import Settings
    from service.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Replica:
    """What serves one model.

    Attributes:
        engine: Runs it.
        scheduler: Feeds the engine; its ``run`` is not started yet.
        model: What clients see.
    """

    engine: Engine
    scheduler: Scheduler
    model: ServedModel


def build_replica(settings: Settings) -> Replica:
    """Loads the model and what serves it; takes seconds.

    Raises:
        StartError: It cannot be served.
    """
    with _one_line_errors():
        return _build(settings)


def _build(settings: Settings) -> Replica:
    from engine.base import ModelLoadError  # noqa: PLC0415
    from scheduler.scheduler import Scheduler  # noqa: PLC0415
    from service.text import ChatTemplate  # noqa: PLC0415

    engine, tokenizer, generation = _scripted(settings, settings.script) if settings.script else _torch(settings)
    if engine.spec.vocab_size != tokenizer.vocab_size:
        raise ModelLoadError(f"the model has {engine.spec.vocab_size} tokens and its vocabulary {tokenizer.vocab_size}")
    limits = SchedulerSettings(
        max_running=settings.max_running,
        chunk_tokens=settings.chunk_tokens,
        max_waiting=settings.max_waiting,
        overlap=settings.overlap,
    )
    model = ServedModel(
        spec=engine.spec,
        aliases=_aliases(settings, engine.spec.name),
        tokenizer=tokenizer,
        template=None if tokenizer.chat_template is None else ChatTemplate.of(tokenizer),
        page_size=engine.page_size,
        pool_tokens=engine.num_pages * engine.page_size,
        generation=generation,
        eviction=settings.eviction if settings.cache == "radix" else "",
    )
    return Replica(engine, Scheduler(engine, _cache(settings), limits), model)


def _torch(settings: Settings) -> tuple[Engine, Tokenizer, str]:
    from engine.model_path import recommended_temperature, resolve_model  # noqa: PLC0415
    from service.text import Tokenizer  # noqa: PLC0415

    # The tokenizer first: it is quick, and a wrong file need not wait for torch to load.
    path = resolve_model(settings.model)
    generation = file_generation(path)
    tokenizer = Tokenizer.from_gguf(path)
    from engine.torch_engine import TorchEngine  # noqa: PLC0415

    engine = TorchEngine(
        path,
        temperature=recommended_temperature(settings.model),
        dtype=settings.dtype,
        page_size=settings.page_size,
        pool_tokens=settings.pool_tokens,
        max_rows=settings.max_running,
        threads=settings.threads,
        context=settings.context,
    )
    return engine, tokenizer, generation


def _scripted(settings: Settings, script: str) -> tuple[Engine, Tokenizer, str]:
    from engine.script import read_script  # noqa: PLC0415
    from service.text import PieceTokenizer  # noqa: PLC0415

    played = read_script(Path(script))
    from engine.scripted import ScriptedEngine  # noqa: PLC0415

    engine = ScriptedEngine(
        played,
        page_size=settings.page_size,
        pool_tokens=settings.pool_tokens,
        max_rows=settings.max_running,
        context=settings.context,
    )
    tokenizer = PieceTokenizer(
        played.pieces,
        special=played.special_ids,
        eos_token_ids=played.eos_ids,
        bos_token_id=played.bos_id,
        add_bos=played.bos_id is not None,
        chat_template=played.chat_template,
    )
    return engine, tokenizer, script_generation(Path(script))


def _cache(settings: Settings) -> PrefixCache:
    from kvcache import NaiveCache, RadixCache  # noqa: PLC0415

    if settings.cache == "naive":
        return NaiveCache(settings.page_size)
    return RadixCache(settings.page_size, policy=settings.eviction)


def file_generation(path: Path) -> str:
    """What tells a model file from any other that had or will have its name: its name, size and time of change.

    Reading all of it would take longer than loading the model does.
    """
    known = path.stat()
    return _digest(f"{path.name}\0{known.st_size}\0{known.st_mtime_ns}".encode())


def script_generation(path: Path) -> str:
    """The same of a script, by its content; of one that can be read only once (a pipe), by its name."""
    return _digest(path.read_bytes() if path.is_file() else str(path).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _aliases(settings: Settings, name: str) -> tuple[str, ...]:
    """What the operator called the model is a name for it as well; a file's path is not."""
    asked = settings.model
    if settings.script or asked == name or Path(asked).suffix or "/" in asked:
        return ()
    return (asked,)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    from engine.base import ModelLoadError  # noqa: PLC0415
    from service.text import TextError  # noqa: PLC0415

    try:
        yield
    except (ModelLoadError, TextError) as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(f"{error.filename or 'the model'}: {error.strerror or error}") from error
    except (ValueError, ArithmeticError, MemoryError, RuntimeError) as error:
        # Torch reports a pool or a model that does not fit the memory as a RuntimeError with a stack in its text.
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartError(f"the engine did not start: {first_line}") from error
