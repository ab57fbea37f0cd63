"""API keys at every door: who gets in, what for, and that no key is ever repeated."""

import json
import logging
from typing import Any

import pytest

from distserve.api_keys import tenant_salt
from distserve.errors import Overloaded, Unauthorized
from distserve_gateway.guard import FREE
from distserve_gateway.intake import Intake
from distserve_gateway.keys import OPEN, Keys
from distserve_gateway.tokenizing import ModelTokenizer
from tests.unit.gateway.keyed import BODIES, CHAT, COMPLETIONS, ask, ask_on_nats, bearer, error, key, keyed, secret
from tests.unit.gateway.scripted import Cluster, says, serving
from tests.unit.gateway.test_operations import samples

NEEDS_KEY = [
    *(("POST", path) for path in BODIES),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/v1/nothing"),
]


def last_salt(cluster: Cluster) -> str:
    return cluster.workers["p0"].submitted[-1].cache_salt


@pytest.mark.parametrize("method_path", NEEDS_KEY)
@pytest.mark.parametrize(
    ("authorization", "words"),
    [
        (None, "no API key: send the header 'Authorization: Bearer <key>'"),
        ("", "no API key"),
        ("Basic dXNlcjpwYXNz", "must be 'Bearer <key>'"),
        ("Bearer", "must be 'Bearer <key>'"),
        (secret("a"), "must be 'Bearer <key>'"),
        ("Bearer " + secret("b"), "the API key is not one of this service"),
        ("Bearer " + secret("a")[:-1], "not one of this service"),
        ("Bearer " + secret("a") + " x", "not one of this service"),
        ("Bearer ключ", "not one of this service"),
    ],
)
async def test_without_a_key_of_the_service_every_route_is_401(
    method_path: tuple[str, str], authorization: str | None, words: str
) -> None:
    method, path = method_path
    async with keyed(says("x"), key("a")) as cluster, cluster.client() as client:
        headers = {} if authorization is None else {"Authorization": authorization.encode()}
        response = await client.request(method, path, json=BODIES.get(path, {}), headers=headers)
        found = error(response, 401)
        assert (found["type"], found["code"], found["param"]) == ("authentication_error", "invalid_api_key", None)
        assert words in found["message"]
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
        assert cluster.workers["p0"].submitted == []


async def test_health_metrics_version_and_documentation_are_for_everybody() -> None:
    async with keyed(says("x"), key("a")) as cluster, cluster.client() as client:
        for path in FREE:
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/version/")).status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
async def test_with_a_key_every_route_answers(scheme: str) -> None:
    headers = {"Authorization": f"{scheme} {secret('b')}"}
    async with keyed(says("x"), key("a"), key("b"), key("c")) as cluster, cluster.client() as client:
        for path, body in BODIES.items():
            assert (await client.post(path, json=body, headers=headers)).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "a"}, headers=headers)).json()["count"] > 0
        assert (await client.post("/detokenize", json={"tokens": [70]}, headers=headers)).status_code == 200
        assert len((await client.get("/v1/models", headers=headers)).json()["data"]) == 1
        assert (await client.get("/v1/models/tiny", headers=headers)).json()["id"] == "tiny"
        assert (await client.get("/v1/nothing", headers=headers)).status_code == 404


async def test_the_body_of_a_stranger_is_not_read() -> None:
    async with keyed(says("x"), key("a"), max_body_bytes=1024) as cluster, cluster.client() as client:
        response = await client.post(COMPLETIONS, content=b"no json " * 1000, headers={"content-type": "text/plain"})
        assert response.status_code == 401


async def test_the_door_on_nats_asks_for_one_too() -> None:
    async with keyed(says("x"), key("a")) as cluster:
        for name, words in (("", "no API key"), ("b", "not one of this service")):
            [refused] = await ask_on_nats(cluster, name)
            assert (refused["error"]["type"], refused["error"]["code"]) == ("authentication_error", "invalid_api_key")
            assert words in refused["error"]["message"]
        [lower] = await ask_on_nats(cluster, "", headers={"authorization": f"Bearer {secret('a')}"})
        [given] = await ask_on_nats(cluster, "a")
        assert [m["choices"][0]["text"] for m in (lower, given)] == ["x", "x"]


async def test_without_keys_everybody_may_ask_whatever_they_send() -> None:
    async with serving(says("x")) as cluster:
        for name in ("", "a"):
            assert (await ask(cluster, name)).status_code == 200
            assert last_salt(cluster) == ""
            assert (await ask_on_nats(cluster, name))[0]["choices"][0]["text"] == "x"
        assert (await ask(cluster, "", cache_salt="s")).status_code == 200
        assert last_salt(cluster) == "s"
        assert (await ask(cluster, "", priority="vip")).status_code == 200


async def test_a_model_that_the_key_may_not_use_does_not_exist_for_it() -> None:
    keys = key("a", models=("tiny", "other")), key("b", models=("other",))
    async with keyed(says("x"), *keys) as cluster, cluster.client() as client:
        for fields in ({}, {"model": "tiny"}, {"model": "other"}):
            found = error(await ask(cluster, "b", **fields), 404)
            assert (found["type"], found["code"], found["param"]) == ("not_found_error", "model_not_found", "model")
            assert "does not exist, or API key 'b' may not use it" in found["message"]
        [refused] = await ask_on_nats(cluster, "b")
        assert refused["error"]["code"] == "model_not_found"
        assert (await client.get("/v1/models", headers=bearer("b"))).json()["data"] == []
        assert (await client.get("/v1/models/tiny", headers=bearer("b"))).status_code == 404
        assert (await client.post("/tokenize", json={"prompt": "a"}, headers=bearer("b"))).status_code == 404
        assert (await client.post("/detokenize", json={"tokens": [70]}, headers=bearer("b"))).status_code == 404
        assert cluster.workers["p0"].submitted == []
        assert (await ask(cluster, "a")).status_code == 200
        assert len((await client.get("/v1/models", headers=bearer("a"))).json()["data"]) == 1
        assert error(await ask(cluster, "a", model="other"), 404)["code"] == "model_not_found"


async def test_what_a_key_may_not_ask_for_is_refused_before_any_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[str] = []

    async def encode(self: ModelTokenizer, texts: Any, **options: Any) -> Any:
        worked.extend(texts)
        raise AssertionError

    monkeypatch.setattr(ModelTokenizer, "encode_off_loop", encode)
    monkeypatch.setattr(Intake, "chat_text", lambda self, body: worked.append("rendered"))
    async with keyed(says("x"), key("a"), key("b", models=("other",))) as cluster:
        for path in BODIES:
            assert error(await ask(cluster, "b", path), 404)["code"] == "model_not_found"
            assert error(await ask(cluster, "a", path, model="other"), 404)["code"] == "model_not_found"
            assert error(await ask(cluster, "a", path, priority="vip"), 403)["code"] == "forbidden"
            assert error(await ask(cluster, "a", path, temperature=9), 400)["param"] == "temperature"
            assert error(await ask(cluster, "a", path, ttft_slo_ms=-1), 400)["param"] == "ttft_slo_ms"
        assert error(await ask(cluster, "b", prompt=[1_000_000]), 404)["code"] == "model_not_found"
        assert worked == []


async def test_each_key_is_a_tenant_whose_cache_nobody_else_can_reach() -> None:
    async with keyed(says("x"), key("a"), key("b")) as cluster:
        salts = {}
        for name in ("a", "b"):
            for salt in (None, "s", "key"):
                assert (await ask(cluster, name, cache_salt=salt)).status_code == 200
                salts[name, salt] = last_salt(cluster)
                assert salts[name, salt] == tenant_salt(name, salt or "")
        assert len(set(salts.values())) == 6
        for stolen in salts.values():
            assert error(await ask(cluster, "b", cache_salt=stolen), 400)["param"] == "cache_salt"


async def test_no_key_stands_in_a_log_an_error_or_an_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    mine, wrong = secret("a"), secret("nobody")
    async with keyed(says("x"), key("a", requests_per_minute=6)) as cluster:
        answers = [await ask(cluster, "a"), await ask(cluster, "nobody"), await ask(cluster, "a", path=CHAT)]
        answers.append(await ask(cluster, "", headers={"Authorization": mine}))
        answers.append(await ask(cluster, "a", priority="vip"))
        answers.append(await ask(cluster, "a", max_tokens=0))
        cluster.workers["p0"].refusal = Overloaded("busy")
        answers.append(await ask(cluster, "a"))
        on_nats = [await ask_on_nats(cluster, name) for name in ("a", "nobody")]
        assert [a.status_code for a in answers] == [200, 401, 200, 401, 403, 400, 503]
        said = caplog.text + json.dumps(on_nats) + "".join(a.text + str(a.headers) for a in answers)
        assert mine not in said
        assert wrong not in said
        assert key("a").sha256 not in said
        assert mine not in repr(vars(cluster.gateway))


async def test_refusals_are_counted_by_code() -> None:
    async with keyed(says("x"), key("a")) as cluster:
        await ask(cluster, "")
        await ask(cluster, "b", path=CHAT)
        await ask_on_nats(cluster, "b")
        await ask(cluster, "a", priority="vip")
        found = await samples(cluster)
        assert found["distserve_gateway_requests_total{kind=completion,outcome=invalid_api_key}"] == 2
        assert found["distserve_gateway_requests_total{kind=chat,outcome=invalid_api_key}"] == 1
        assert found["distserve_gateway_requests_total{kind=completion,outcome=forbidden}"] == 1


async def test_openapi_says_where_a_key_is_needed() -> None:
    async with keyed(says("x"), key("a")) as cluster, cluster.client() as client:
        document = (await client.get("/openapi.json")).json()
        [(scheme, described)] = document["components"]["securitySchemes"].items()
        assert (described["type"], described["scheme"]) == ("http", "bearer")
        for path, operations in document["paths"].items():
            for operation in operations.values():
                assert operation.get("security", []) == ([] if path in FREE else [{scheme: []}]), path
    async with serving(says("x")) as cluster, cluster.client() as client:
        document = (await client.get("/openapi.json")).json()
        assert "securitySchemes" not in document["components"]


def test_every_entry_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []

    def watched(a: Any, b: Any) -> bool:
        compared.append(a)
        return bool(a == b)

    monkeypatch.setattr("distserve_gateway.keys.hmac.compare_digest", watched)
    keys = Keys([key("a"), key("b"), key("c")])
    for name in ("a", "c"):
        assert keys.of(f"Bearer {secret(name)}").name == name
    with pytest.raises(Unauthorized):
        keys.of("Bearer x")
    assert compared == [key(name).sha256 for name in "abc"] * 3
    assert Keys().of("Bearer x") is OPEN


@pytest.mark.parametrize("door", ["HTTP", "NATS"])
async def test_a_request_is_asked_for_its_key_once(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    async with keyed(says("x"), key("a"), key("b")) as cluster:
        for path in BODIES if door == "HTTP" else [COMPLETIONS]:
            with monkeypatch.context() as patch:
                patch.setattr("distserve_gateway.keys.hmac.compare_digest", lambda a, b: compared.append(a) or a == b)
                answer = await ask(cluster, "a", path) if door == "HTTP" else await ask_on_nats(cluster, "a")
            assert "error" not in str(answer)
            assert last_salt(cluster) == tenant_salt("a")
            assert compared == [key("a").sha256, key("b").sha256]
            compared.clear()
