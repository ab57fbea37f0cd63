"""What FastAPI can't see of the routes, for the OpenAPI document: bodies, from the structs that decode them; headers;
and who needs an API key."""

from typing import Any

import msgspec
from fastapi import FastAPI

from distserve_gateway.envelope import HEADERS
from distserve_gateway.guard import FREE
from distserve_gateway.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    SampledBody,
    TokenizeBody,
)

_BODIES = (ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody)
_REF = "#/components/schemas/{name}"
_FIELDS = ("session_id", "priority", "ttft_slo_ms", "tpot_slo_ms", "deadline_ms")  # have headers
_FIRST_TOKEN = "true: first token here, the rest by the fallback server; false: all here. Default: as the breaker says."
_SCHEME = "ApiKey"


def body(kind: type[Body]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes this body."""
    schema = {"$ref": _REF.format(name=kind.__name__)}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if issubclass(kind, SampledBody):
        kinds = {name: {"type": "number" if name.endswith("_ms") else "string"} for name in _FIELDS}
        extra["parameters"] = [
            *(_header(name, f"`{name}` where the body does not say it.", kinds[name]) for name in _FIELDS),
            _header("first_token", _FIRST_TOKEN, {"type": "string", "enum": ["true", "false"]}),
        ]
    return extra


def _header(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": HEADERS[name], "in": "header", "description": description, "schema": schema}


def complete(app: FastAPI, *, needs_key: bool) -> None:
    """Have the app's document hold the bodies' schemas and, if a key is needed, say where."""
    generate = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = generate()
            components = found.setdefault("components", {})
            _, schemas = msgspec.json.schema_components(_BODIES, ref_template=_REF)
            components.setdefault("schemas", {}).update(schemas)
            if needs_key:
                components["securitySchemes"] = {_SCHEME: {"type": "http", "scheme": "bearer"}}
                for path, operations in found["paths"].items():
                    for operation in operations.values() if path not in FREE else ():
                        operation["security"] = [{_SCHEME: []}]
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
