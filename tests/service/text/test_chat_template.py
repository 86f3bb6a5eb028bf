from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from service.text import ChatTemplate, NoChatTemplateError, PieceTokenizer, TemplateError, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HI = [{"role": "user", "content": "hi"}]


def test_the_default_model_s_template_gives_the_text_it_was_trained_on(smollm: Tokenizer) -> None:
    assert ChatTemplate.of(smollm).render(HI) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_conversation_keeps_its_turns_and_its_own_system_message(smollm: Tokenizer) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
    assert ChatTemplate.of(smollm).render(turns, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n"
    )


def test_a_rendered_chat_encodes_to_control_tokens_at_its_turns(smollm: Tokenizer) -> None:
    ids = smollm.encode(ChatTemplate.of(smollm).render(HI), parse_special=True)
    assert [i for i in ids if smollm.is_special(i)] == [1, 2, 1, 2, 1]


def test_a_chat_of_a_model_with_bos_has_one_whether_or_not_its_template_writes_it(
    write_gguf: Callable[..., Path],
) -> None:
    body = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    for source in ("{{ bos_token }}" + body, body):
        tokenizer = Tokenizer.from_gguf(write_gguf(chat_template=source))
        ids = tokenizer.encode(ChatTemplate.of(tokenizer).render(HI), parse_special=True)
        assert ids == [257, 256, 258]


def test_a_model_without_a_template_is_an_error_of_its_own() -> None:
    with pytest.raises(NoChatTemplateError, match="no chat template"):
        ChatTemplate.of(PieceTokenizer.bytewise())


def test_blocks_leave_no_lines_of_their_own() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source).render([*HI, *HI]) == "user\nuser\n"


def test_what_hugging_face_templates_use_is_there() -> None:
    def rendered(source: str) -> str:
        return ChatTemplate(source, clock=lambda: datetime(2024, 7, 26)).render(HI)

    assert rendered("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"
    assert rendered("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert rendered("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert rendered("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert rendered("{{ tools is none }} {{ documents is none }} {{ nothing is defined }}") == "True True False"
    assert rendered("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"


def test_a_template_can_refuse_a_conversation_with_its_own_words() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('A system message must come first') }}{% endif %}"
    with pytest.raises(TemplateError, match="refused the conversation: A system message must come first"):
        ChatTemplate(source).render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages + 1 }}",
        "{{ nosuch('x') }}",
        "{% include 'file' %}",
    ],
)
def test_a_template_that_fails_is_a_typed_error(source: str) -> None:
    with pytest.raises(TemplateError, match="the chat template failed"):
        ChatTemplate(source).render(HI)


def test_a_template_that_is_no_jinja_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(TemplateError, match="broken"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ range(10 ** 9) | list | length }}",
        "{{ range(1000000000) | list | length }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * [0] }}",
    ],
)
def test_a_template_reaches_nothing_outside_and_makes_nothing_huge(source: str) -> None:
    with pytest.raises(TemplateError, match="failed"):
        ChatTemplate(source).render(HI)


def test_ordinary_products_are_still_products() -> None:
    assert ChatTemplate("{{ 6 * 7 }} {{ '-' * 3 }} {{ 2.5 * 2 }}").render(HI) == "42 --- 5.0"


def test_a_text_beyond_the_limit_is_an_error_while_it_is_being_made() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", max_characters=1000)
    with pytest.raises(TemplateError, match="exceeds 1000 characters"):
        template.render(HI)


def test_rendering_does_not_change_what_it_was_given() -> None:
    messages = [{"role": "user", "content": "{{ 7 * 7 }}"}]
    assert ChatTemplate("{{ messages[0].content }}").render(messages) == "{{ 7 * 7 }}"
    assert messages == [{"role": "user", "content": "{{ 7 * 7 }}"}]
