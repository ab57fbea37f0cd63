"""Messages to a prompt, by the Jinja template that comes with the model, in the dialect that templates are written
for: the environment and the names that `transformers` documents for chat templates."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from distserve.errors import ConfigError, InvalidRequest
from distserve_gateway.tokenizing import read_json

Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what training looks at; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own contract

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which is meant for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


class ChatTemplate:
    """A compiled template and the special tokens it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise ConfigError(f"the model's chat template, line {e.lineno}: {e.message}", key="model.path") from e
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """chat_template.jinja, else `chat_template` in tokenizer_config.json (the one named "default" of several)."""
        config = read_json(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        if not source:
            return None
        return cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises InvalidRequest with what the template complains of."""
        try:
            return self._template.render(
                self._special_tokens
                | {"tools": None, "documents": None}
                | dict(variables or {})
                | {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
            )
        except jinja2.TemplateError as e:  # raise_exception() and the sandbox's refusals too
            raise InvalidRequest(f"the chat template refuses these messages: {e.message or e}", param="messages") from e
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as e:
            raise InvalidRequest(
                f"the chat template fails on these messages: {type(e).__name__}: {e}", param="messages"
            ) from e


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens
