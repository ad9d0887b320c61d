from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.services.gateway.planning.chat_schemas import ChatMessage
from paceline.services.gateway.planning.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hi  "},
    {"role": "assistant", "content": " Hello ", "reasoning": "greet"},
]
TEMPLATES = {
    "blocks": (
        "{{ bos_token }}\n{% for m in messages %}\n  {% if m.role == 'user' %}\n"
        "U:{{ m.content }}\n  {% endif %}\n{% endfor %}"
    ),
    "trims": "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ messages | tojson(indent=2) }}",
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}{% break %}{% endfor %}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
    "tools": "{% if tools is none and documents is none %}no tools{% endif %}{{ messages[0].content }}",
    "prompt": "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}{{ flag }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **options)
    return rendered[0]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(name: str, add_generation_prompt: bool) -> None:
    source = TEMPLATES[name]
    ours = ChatTemplate(source, SPECIAL).render(
        TURNS, add_generation_prompt=add_generation_prompt, template_kwargs={"flag": "on"}
    )
    assert ours == theirs(source, TURNS, add_generation_prompt=add_generation_prompt, flag="on")


@pytest.mark.parametrize("name", ["trims", "prompt", "generation"])
def test_continues_the_last_message_as_transformers_does(name: str) -> None:
    source = TEMPLATES[name]
    ours = ChatTemplate(source, SPECIAL).render(TURNS, add_generation_prompt=False, continue_final_message=True)
    assert ours == theirs(source, TURNS, continue_final_message=True)


def test_continues_a_list_of_texts_as_transformers_does() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}{{ eos_token }}"
        "{% endfor %}"
    )
    turns = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    ours = ChatTemplate(source, SPECIAL).render(turns, add_generation_prompt=False, continue_final_message=True)
    assert ours == theirs(source, turns, continue_final_message=True) == "[assistant]ab"


def test_strftime_now_is_in_scope() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(TURNS).isdigit()


def test_a_key_without_a_value_is_not_there() -> None:
    source = "{{ 'name' in messages[0] }}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "x", "name": None}]) == "False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.x.y }}",
        "{{ 'a' + messages[0].absent }}",
    ],
)
def test_what_a_template_raises_is_the_request_s_fault(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source, {}).render(TURNS)
    assert caught.value.param == "messages"


def test_a_developer_is_the_system_unless_the_template_knows_better() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", {}).render(messages) == "system"
    assert ChatTemplate("{{ messages[0].role }}{# developer #}", {}).render(messages) == "developer"


def test_templates_cannot_leave_the_sandbox() -> None:
    with pytest.raises(InvalidRequestError, match="unsafe"):
        ChatTemplate("{{ ''.__class__.__mro__ }}", {}).render(TURNS)


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        ChatTemplate("{{ messages[0].content }}", {}).render(
            TURNS, add_generation_prompt=False, continue_final_message=True
        )


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"template_kwargs": {"tools": [{}]}}, "chat_template_kwargs"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate("x", {}).render(TURNS, **options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("source", "roles"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", set()),
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", set()),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", set()),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
            "{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
            {"system", "user", "assistant", "tool"},
        ),
        (
            "{{ messages[0].content[0].text if messages[0].role == 'system' }}{% for m in messages %}"
            "{% if m.role == 'user' and m.content is not string %}{{ m.content | map(attribute='text') | join }}"
            "{% else %}{{ m.content + '' }}{% endif %}{% endfor %}",
            {"user"},
        ),
        (  # as of some versions of Llama 3.2, which write tools into the first message of the user
            "{% if tools %}{{ messages[0].content | trim }}{% endif %}{% for m in messages %}"
            "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}"
            "{% endfor %}{% endif %}{% endfor %}",
            {"assistant", "tool"},
        ),
        (
            "{% set first = messages[0].content if messages[0].role == 'system' else '' %}{% for m in messages %}"
            "{% if first and m.role == 'user' %}{{ first + m.content }}{% elif m.content is string %}{{ m.content }}"
            "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
            {"assistant", "tool"},
        ),
        ("{{ raise_exception('no') }}", set()),
    ],
)
def test_templates_that_read_lists_of_texts_are_found(source: str, roles: set[str]) -> None:
    assert ChatTemplate(source, SPECIAL).roles_with_parts == roles


def test_a_broken_template_is_refused_at_the_start() -> None:
    with pytest.raises(ModelError, match="line 1"):
        ChatTemplate("{% for %}", {})


def called(call_id: str, arguments: str) -> list[dict[str, Any]]:
    """Return a conversation with a tool call and its result."""
    function = {"name": "find", "arguments": arguments}
    return [
        {"role": "user", "content": "Hi"},
        ChatMessage.model_validate(
            {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
        ).for_template(True),
        {"role": "tool", "tool_call_id": call_id, "content": "rain"},
    ]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("call.arguments | tojson", '{"b": "é", "a": 1.0}'),
        ("call.arguments", '{"b":"é","a":1.0}'),
        ("'(' + call.arguments + ')'", '({"b":"é","a":1.0})'),
        ("'(' ~ call.arguments ~ ')'", '({"b":"é","a":1.0})'),
        ("call.arguments if call.arguments is string else (call.arguments | tojson)", '{"b": "é", "a": 1.0}'),
        ("call.arguments.items() | map('join', '=') | join(' ')", "b=é a=1.0"),
    ],
)
def test_arguments_are_an_object_or_their_text_as_the_template_wants(expression: str, expected: str) -> None:
    source = "{% set call = messages[1].tool_calls[0].function %}{{ " + expression + " }}"
    assert ChatTemplate(source, SPECIAL).render(called("x", '{"b":"é","a":1.0}')) == expected


@pytest.mark.parametrize("number", ["1E899", "-1e400"])
def test_numbers_of_arguments_stay_numbers_of_json(number: str) -> None:
    render = ChatTemplate("{{ messages[1].tool_calls[0].function.arguments | tojson }}", SPECIAL).render
    written = render(called("x", f'{{"x": [{number}]}}'))
    assert written.strip("}").endswith("1.7976931348623157e+308]")
    assert ("-" in written) == number.startswith("-")


def test_arguments_that_were_cut_off_are_text() -> None:
    source = "{{ messages[1].tool_calls[0].function.arguments }}"
    assert ChatTemplate(source, SPECIAL).render(called("x", '{"b": "é')) == '{"b": "é'


def test_ids_have_nine_characters_if_the_template_demands_it() -> None:
    source = (
        "{% set own = messages[1].tool_calls[0].id %}{% if own | length != 9 %}{{ raise_exception('no') }}{% endif %}"
        "{{ own }} {{ messages[2].tool_call_id }}"
    )
    template = ChatTemplate(source, SPECIAL)
    own, answered = template.render(called("call_" + "7" * 24, "{}")).split()
    assert own == answered
    assert own.isalnum()
    assert own != template.render(called("call_" + "8" * 24, "{}")).split()[0]
    assert template.render(called("abcDEF123", "{}")) == "abcDEF123 abcDEF123"


def test_later_system_messages_join_the_first_if_the_template_refuses_them() -> None:
    refusing = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    turns = [*TURNS[:2], {"role": "system", "content": "Stop."}]
    assert ChatTemplate(refusing, SPECIAL).render(turns) == "[system]Be <brief> & kind.\n\nStop.[user]Hi  "
    with pytest.raises(InvalidRequestError, match="no"):
        ChatTemplate("{{ raise_exception('no') }}", SPECIAL).render(TURNS)
    plain = "{% for m in messages %}[{{ m.role }}]{% endfor %}"
    assert ChatTemplate(plain, SPECIAL).render(turns) == "[system][user][system]"


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "user"}])
def test_a_message_without_content_has_an_empty_one(message: dict[str, object]) -> None:
    template = ChatTemplate(
        "{% for message in messages %}{{ message['role'] + ':' + message['content'] }}{% endfor %}", {}
    )
    assert template.render([message]) == f"{message['role']}:"
