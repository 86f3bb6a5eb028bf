"""The default model, served whole."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.e2e.process import SERVING
from tests.e2e.wire import Collected

if TYPE_CHECKING:
    from tests.e2e.process import Server

GRPCURL = Path(sys.executable).parent / "grpcurl"
STORY = (
    "Once upon a time, in a small village at the foot of a mountain, there lived an old clockmaker who had never once"
    " been late. Every morning he wound the great clock in the square, and every evening"
)


def generate(server: Server, *, timeout: float = 60, **fields: Any) -> Collected:
    return Collected(server.client.Generate(server.request(**fields), timeout=timeout))


def grpcurl(server: Server, *words: str, data: str = "") -> str:
    flags = ("-d", data) if data else ()
    done = subprocess.run(
        [GRPCURL, "-plaintext", *flags, server.target, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_text_streams_and_a_second_call_finds_its_prompt_in_the_cache(model: Server) -> None:
    salt = {"salt": "second-call"}
    first = generate(model, text=STORY, stop={"max_tokens": 12}, output={"token_ids": True}, cache=salt)
    second = generate(model, text=STORY, stop={"max_tokens": 12}, output={"token_ids": True}, cache=salt)
    prompt_tokens = first.started.prompt_tokens
    assert first.text()
    assert len(first.ids()) == first.finished[0].usage.completion_tokens
    assert len(first.deltas) > 1
    assert first.started.cached_tokens == 0
    assert second.started.cached_tokens == (prompt_tokens - 1) // 16 * 16 > 0
    stats = model.stats()
    assert stats.hit_tokens >= second.started.cached_tokens


def test_ids_and_text_of_one_prompt_are_the_same_request(model: Server) -> None:
    ids = model.client.Tokenize(model.contract.TokenizeRequest(text=STORY)).token_ids
    by_text = generate(model, text=STORY, stop={"max_tokens": 2})
    by_ids = generate(model, token_ids={"ids": ids}, stop={"max_tokens": 2})
    assert by_ids.started.prompt_tokens == by_text.started.prompt_tokens == len(ids)
    assert by_ids.started.cached_tokens > 0
    assert model.client.Detokenize(model.contract.DetokenizeRequest(token_ids=ids)).text == STORY


def test_a_conversation_is_what_its_template_renders(model: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "Say hello <|im_end|>"}]}
    rendered = model.client.RenderChat(model.contract.RenderChatRequest(chat=chat))
    assert rendered.text.endswith("<|im_start|>assistant\n")
    answer = generate(model, chat=chat, stop={"max_tokens": 8}, sampling={"temperature": 0})
    assert answer.started.prompt_tokens == len(rendered.token_ids)
    assert answer.text()
    assert "<|im_end|>" not in answer.text()


def test_the_next_turn_reuses_the_turn_before(model: Server) -> None:
    messages = [{"role": "user", "content": "Name a colour, and say in a sentence or two what it is like."}]
    fields: dict[str, Any] = {"stop": {"max_tokens": 24}, "cache": {"salt": "turns"}}
    first = generate(model, chat={"messages": messages}, **fields)
    messages += [{"role": "assistant", "content": first.text()}, {"role": "user", "content": "And another?"}]
    second = generate(model, chat={"messages": messages}, **fields)
    assert second.started.cached_tokens >= first.started.prompt_tokens // 16 * 16


def test_seeded_continuations_differ_from_each_other_and_repeat(model: Server) -> None:
    fields: dict[str, Any] = {"text": STORY, "stop": {"max_tokens": 8}, "sampling": {"seed": 3, "n": 3}}
    first = generate(model, **fields)
    assert len({first.text(index) for index in range(3)}) > 1
    assert sorted(first.finished) == [0, 1, 2]


def test_the_model_describes_itself(model: Server) -> None:
    found = model.client.GetModel(model.contract.GetModelRequest(model="smollm2"))
    assert "smollm2" in found.aliases
    assert found.architecture == "llama"
    assert found.vocabulary_size == 49152
    assert found.context_length == 1024
    assert found.pool_tokens == 8192
    assert found.chat_template
    assert found.eos_token_ids
    assert found.server_version


def test_reflection_health_and_streaming_work_from_grpcurl(model: Server) -> None:
    listed = grpcurl(model, "list").split()
    assert {f"radixd.v1.{name}Service" for name in ("Generate", "Text", "Model", "Cache")} <= set(listed)
    assert "returns ( stream .radixd.v1.GenerateResponse )" in grpcurl(model, "describe", "radixd.v1.GenerateService")
    assert "SERVING" in grpcurl(model, "grpc.health.v1.Health/Check")
    prompt = '{"text": "One two three", "stop": {"max_tokens": 3}}'
    answer = grpcurl(model, "radixd.v1.GenerateService/Generate", data=prompt)
    assert '"started"' in answer
    assert "FINISH_REASON_LENGTH" in answer


def test_every_service_is_healthy_and_an_unknown_one_is_not_known(model: Server) -> None:
    for name in ("", "Generate", "Text", "Model", "Cache"):
        assert model.status(f"radixd.v1.{name}Service" if name else "") == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        model.health.Check(health_pb2.HealthCheckRequest(service="radixd.v1.Other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_after_a_flush_every_page_is_free_and_nothing_is_found(model: Server) -> None:
    generate(model, text=STORY, stop={"max_tokens": 2})
    freed = model.client.Flush(model.contract.FlushRequest()).freed_pages
    assert freed > 0
    stats = model.stats()
    assert stats.pages_free == stats.pages_total
    assert stats.nodes == 0
    assert generate(model, text=STORY, stop={"max_tokens": 2}).started.cached_tokens == 0


@pytest.mark.timeout(120)
def test_a_huge_prompt_stops_neither_health_nor_a_running_stream(model: Server) -> None:
    huge = ("An awful lot of words, and more of them. " * 130_000)[: 5 << 20]
    call = model.client.Generate(model.request(text=STORY, stop={"max_tokens": 60, "ignore_eos": True}))
    next(call)
    tokenizing = model.client.Tokenize.future(model.contract.TokenizeRequest(text=huge), timeout=100)
    slowest = 0.0
    received = Collected([])
    while not tokenizing.done() or not received.finished:
        began = time.monotonic()
        assert model.status() == SERVING
        slowest = max(slowest, time.monotonic() - began)
        response = next(call, None)
        if response is not None:
            received.add(response)
    assert received.finished[0].usage.completion_tokens == 60
    assert slowest < 1, "the event loop was blocked"
