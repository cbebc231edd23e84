"""The description of the served store: OpenAPI 3.1, made from the verbs and from the records they speak."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from strop.net.asgi import ErrorBody
from strop.store import wire
from strop.store.base import ID
from strop.store.rpc import VERBS, Verb
from strop.types import Rollout
from strop.version import __version__

Json = dict[str, Any]

REFUSALS = {
    400: "The request is malformed, or a reward is not a finite number or too large.",
    401: "No key, or a wrong one.",
    403: "An attempt's key, which opens that attempt only.",
    404: "There is no such rollout, attempt, step or policy.",
    409: "The store refuses: the attempt is over, a status may not follow another, something was recorded before.",
    413: "The body is too large.",
    500: "The server ran into an error of its own.",
    410: "The run whose store this was has ended.",
    503: "The store cannot be reached or cannot write now: try again later.",
}

ABOUT = """A store of rollouts. Programs queue them, runners lease them, run agents on them and report what came of it.
Every address below /v1/ wants the run's key, every address below /r/ the attempt's (or the run's). A request that got
no answer may be sent again: what was done is not done twice."""


def describe() -> Json:
    answers = [ErrorBody, wire.AgentEvent, wire.RecordedCount, wire.Health, Rollout]
    types = [*(verb.takes for verb in VERBS), *(verb.gives for verb in VERBS), *answers]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for component in components.values():
        if "description" in component:  # its first paragraph: the rest is for readers of the code
            component["description"] = " ".join(component["description"].partition("\n\n")[0].split())
    paths: dict[str, Json] = {}
    for n, verb in enumerate(VERBS):
        operation = _operation(verb, schemas[n], schemas[len(VERBS) + n], components)
        paths.setdefault(verb.path, {})[verb.method.lower()] = operation
    for name in {verb.takes.__name__ for verb in VERBS if verb.method == "GET"}:
        del components[name]  # told parameter by parameter
    return {
        "openapi": "3.1.0",
        "info": {"title": "Strop store", "version": __version__, "description": " ".join(ABOUT.split())},
        "paths": paths | _attempt_paths() | _open_paths(),
        "components": {
            "schemas": components,
            "responses": {
                str(status): {"description": says, "content": {"application/json": {"schema": _ref("ErrorBody")}}}
                for status, says in REFUSALS.items()
            },
            "securitySchemes": {
                "run": {"type": "http", "scheme": "bearer", "description": "the run's key, as `strop serve` says it"},
                "attempt": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "an attempt's key, as its lease says it",
                },
            },
        },
    }


def _operation(verb: Verb[Any], takes: Json, gives: Json, components: Json) -> Json:
    told: Json = {
        "operationId": verb.name,
        "summary": verb.about.partition(". ")[0].rstrip("."),
        "description": verb.about,
        "security": [{"run": []}],
        "responses": _responses(gives, (400, 401, 403, 404, 500, 503)),
    }
    parameters = _in_path(verb.path)
    if verb.method == "GET":
        parameters += _in_query(verb.takes, components)
    else:
        told["requestBody"] = _body(takes)
        told["responses"] |= _refusals((409, 413))
    return told | ({"parameters": parameters} if parameters else {})


def _in_path(path: str) -> list[Json]:
    known: dict[str, Json] = {
        "{id}": {
            "name": "id",
            "description": "a rollout's id",
            "schema": {"type": "string", "pattern": _whole(ID.pattern)},
        },
        "{n}": {"name": "n", "description": "an attempt's number", "schema": {"type": "integer", "minimum": 0}},
        "{rollout}": {"name": "rollout", "description": "a rollout's id", "schema": {"type": "string"}},
        "{attempt}": {"name": "attempt", "description": "an attempt's number", "schema": {"type": "integer"}},
    }
    return [{**told, "in": "path", "required": True} for name, told in known.items() if name in path]


def _whole(pattern: str) -> str:
    return f"^{pattern}$"


def _in_query(asks: type[Struct], components: Json) -> list[Json]:
    return [
        {
            "name": name,
            "in": "query",
            "description": schema.get("description", ""),
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for name, schema in components[asks.__name__]["properties"].items()
    ]


def _attempt_paths() -> dict[str, Json]:
    either: list[Json] = [{"attempt": []}, {"run": []}]
    said = _ref("AgentEvent")
    path = "/r/{rollout}/{attempt}"
    report: Json = {
        "operationId": "report",
        "summary": "Record what an agent says",
        "description": "Record an event of this attempt, or a list of them. One with an id is recorded once.",
        "security": either,
        "parameters": _in_path(path),
        "requestBody": _body({"anyOf": [said, {"type": "array", "items": said}]}),
        "responses": _responses(_ref("RecordedCount"), (400, 401, 404, 409, 413, 500, 503)),
    }
    look: Json = {
        "operationId": "look",
        "summary": "An attempt's rollout",
        "description": "The rollout that this attempt runs.",
        "security": either,
        "parameters": _in_path(path),
        "responses": _responses(_ref("Rollout"), (401, 404, 500, 503)),
    }
    return {path + "/events": {"post": report}, path: {"get": look}}


def _open_paths() -> dict[str, Json]:
    """Those that want no key."""

    def told(id: str, says: str, gives: Json) -> Json:
        return {"get": {"operationId": id, "summary": says, "description": says, "responses": _responses(gives, ())}}

    return {
        "/": told("about", "What this is and where its description is", {"type": "object"}),
        "/health": told("health", "Whether it answers", _ref("Health")),
        "/openapi.json": told("description", "This description", {"type": "object"}),
    }


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _body(schema: Json) -> Json:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _responses(gives: Json, refusals: tuple[int, ...]) -> Json:
    done = {"description": "Done.", "content": {"application/json": {"schema": gives}}}
    return {"200": done} | _refusals(refusals)


def _refusals(statuses: tuple[int, ...]) -> Json:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}
