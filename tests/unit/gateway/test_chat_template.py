"""Chat templates in the dialect that models' templates are written in."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from distserve.errors import ConfigError, InvalidRequest
from distserve_gateway.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "a <b> & 'ü'"}]


def folder(path: Path, config: dict[str, Any], file: str | None = None) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (path / "chat_template.jinja").write_text(file)
    return path


def test_blocks_leave_no_blank_lines_behind() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}!\n    {% endif %}\n{% endfor %}\n"
    )
    assert template.render(MESSAGES) == "user!\n"


def test_tojson_does_not_escape_for_html() -> None:
    assert ChatTemplate("{{ messages | tojson }}").render(MESSAGES) == json.dumps(MESSAGES, ensure_ascii=False)
    assert ChatTemplate("{{ messages[0] | tojson(indent=1) }}").render(MESSAGES).startswith('{\n "role"')


def test_strftime_now_and_loop_controls_and_generation_blocks() -> None:
    source = (
        "{{ strftime_now('%d %b %Y') }}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}[{{ messages[0].role }}]{% endgeneration %}"
    )
    assert ChatTemplate(source, now=lambda: datetime(2024, 7, 26)).render(MESSAGES) == "26 Jul 202401[user]"


def test_raise_exception_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequest, match="only once") as caught:
        ChatTemplate("{{ raise_exception('only once') }}").render(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_fails_in_the_sandbox_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(MESSAGES)


def test_variables_of_the_request_reach_the_template_but_replace_no_messages() -> None:
    template = ChatTemplate("{{ messages[0].role }}{{ enable_thinking }}{{ add_generation_prompt }}")
    given = {"enable_thinking": False, "messages": "no"}
    assert template.render(MESSAGES, add_generation_prompt=False, variables=given) == "userFalseFalse"


def test_a_template_may_ask_for_tools_and_find_none() -> None:
    assert ChatTemplate("{% if tools is none %}none{% endif %}").render(MESSAGES) == "none"


def test_special_tokens_are_known_by_name(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}|{{ eos_token }}", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    template = ChatTemplate.from_folder(folder(tmp_path, config))
    assert template is not None
    assert template.render(MESSAGES) == "<s>|</s>"


def test_a_file_of_its_own_comes_before_the_configuration(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(folder(tmp_path, {"chat_template": "config"}, "file"))
    assert template is not None
    assert template.render(MESSAGES) == "file"


def test_of_several_the_default_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    template = ChatTemplate.from_folder(folder(tmp_path, {"chat_template": several}))
    assert template is not None
    assert template.render(MESSAGES) == "plain"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(folder(tmp_path, {})) is None
    assert ChatTemplate.from_folder(tmp_path / "nowhere") is None


def test_a_broken_template_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("fine\n{% if %}")


def test_the_same_as_transformers(tmp_path: Path) -> None:
    """The reference itself, on templates of models that people run. Needs no model."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    sources = [
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n'"
        " + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}",
        "{{ bos_token }}{% for message in messages %}\n  {%- if message.role == 'user' %}\n[INST] "
        "{{ message.content | trim }} [/INST]\n  {%- else %}\n {{ message | tojson }}{{ eos_token }}\n  {%- endif %}\n"
        "{%- endfor %}",
    ]
    messages = [*MESSAGES, {"role": "assistant", "content": " ok\n"}, {"role": "user", "content": "<more>"}]
    for source in sources:
        tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        rendered, _ = utils.render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=True, **tokens
        )
        assert ChatTemplate(source, tokens).render(messages) == rendered[0]
