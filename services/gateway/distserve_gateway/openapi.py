"""The request bodies in the OpenAPI document: generated from the structs that decode them."""

from typing import Any

import msgspec
from fastapi import FastAPI

from distserve_gateway.schema import Body, ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody

_BODIES = (ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody)
_REF = "#/components/schemas/{name}"


def body(kind: type[Body]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes this body."""
    schema = {"$ref": _REF.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_schemas(app: FastAPI) -> None:
    """Have the app's document hold the bodies' schemas."""
    generate = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            _, schemas = msgspec.json.schema_components(_BODIES, ref_template=_REF)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
