"""Chat messages as templates take them: role and one string of content."""

from collections.abc import Sequence

from distserve.errors import InvalidRequest, UnsupportedFeature
from distserve_gateway.schema import ChatMessage, ContentPart

# "developer" is OpenAI's later name for "system"; the templates of open models know only the latter.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def plain(messages: Sequence[ChatMessage] | None) -> list[dict[str, str]]:
    """Checked messages. Text parts are joined by line breaks. Raises InvalidRequest naming the message."""
    if not messages:
        raise InvalidRequest("messages is missing or empty, must hold at least one message", param="messages")
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain(message: ChatMessage, where: str) -> dict[str, str]:
    if message.role in ("tool", "function"):
        raise UnsupportedFeature(f"{where}.role is {message.role!r}: tools are not supported", param=f"{where}.role")
    if message.role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role is {message.role!r}, must be one of {', '.join(_ROLES)}",
            param=f"{where}.role",
            value=message.role,
        )
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise UnsupportedFeature(f"{where}.{name} is given: tools are not supported", param=f"{where}.{name}")
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"{where}.content is missing, must be text", param=f"{where}.content")
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    plain = {"role": _ROLES[message.role], "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise UnsupportedFeature(
            f"{where}.type is {part.type!r}, must be 'text': other content is not supported",
            param=f"{where}.type",
            value=part.type,
            expected="text",
        )
    if part.text is None:
        raise InvalidRequest(f"{where}.text is missing, must be text", param=f"{where}.text")
    return part.text
