"""What a request is promised: its body's words, else its headers', else its API key's, else the configuration's."""

from typing import Any

import pytest

from distserve.api_keys import PRIORITIES
from distserve.config import SloConfig
from distserve_gateway.calls import Call, Terms
from distserve_gateway.submission import Submission
from tests.unit.gateway.keyed import BODIES, ask, ask_on_nats, error, key, keyed
from tests.unit.gateway.scripted import says, serving

SLO = SloConfig(ttft_ms=400, tpot_ms=40, deadline_ms=4000)
KEYS = (
    key("plain"),
    key("vip", priority="vip", ttft_slo_ms=300, tpot_slo_ms=30.5, deadline_ms=3000),
    key("bulk", priority="batch"),
)
HEADERS = {"X-Priority": "Batch", "X-TTFT-SLO-Ms": "200", "X-TPOT-SLO-Ms": " 20.25 ", "X-Deadline-Ms": "2000"}
FIELDS = {"priority": "NORMAL", "ttft_slo_ms": 100, "tpot_slo_ms": 10.5, "deadline_ms": 1000}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What has been submitted."""
    seen: list[Call] = []
    submit = Submission.open

    def watched(self: Submission, call: Call, *rest: Any, **options: Any) -> Any:
        seen.append(call)
        return submit(self, call, *rest, **options)

    monkeypatch.setattr(Submission, "open", watched)
    return seen


@pytest.mark.parametrize(
    ("name", "headers", "fields", "terms"),
    [
        ("plain", {}, {}, Terms("normal", 0.4, 0.04, 4.0)),
        ("vip", {}, {}, Terms("vip", 0.3, 0.0305, 3.0)),
        ("bulk", {}, {}, Terms("batch", 0.4, 0.04, 4.0)),
        ("vip", HEADERS, {}, Terms("batch", 0.2, 0.02025, 2.0)),
        ("vip", HEADERS, FIELDS, Terms("normal", 0.1, 0.0105, 1.0)),
        ("vip", HEADERS, dict.fromkeys(FIELDS), Terms("batch", 0.2, 0.02025, 2.0)),
        ("vip", dict.fromkeys(HEADERS, ""), {"priority": 0}, Terms("vip", 0.3, 0.0305, 3.0)),
        ("plain", {"X-TTFT-SLO-Ms": "0.5"}, {"deadline_ms": 0.5}, Terms("normal", 0.0005, 0.04, 0.0005)),
    ],
)
async def test_body_wins_over_header_over_key_over_configuration(
    calls: list[Call], name: str, headers: dict[str, str], fields: dict[str, Any], terms: Terms
) -> None:
    async with keyed(says("x"), *KEYS, slo=SLO) as cluster:
        for path in BODIES:
            # The shortest deadline of these may be over before the answer is: what was submitted counts.
            await ask(cluster, name, path, headers=headers, **fields)
        await ask_on_nats(cluster, name, headers=headers, **fields)
        assert len(calls) == 4
        for call in calls:
            found = call.terms
            assert found.tenant == name
            assert (found.priority, found.ttft_s, found.tpot_s, found.deadline_s) == (
                terms.priority,
                pytest.approx(terms.ttft_s),
                pytest.approx(terms.tpot_s),
                pytest.approx(terms.deadline_s),
            )


async def test_without_words_keys_and_settings_nothing_is_promised(calls: list[Call]) -> None:
    async with serving(says("x")) as cluster:
        assert (await ask(cluster, "")).status_code == 200
        assert calls[0].terms == Terms()


@pytest.mark.parametrize(
    ("priority", "traffic_class"), [("vip", "decode"), ("normal", "prefill"), ("batch", "background")]
)
async def test_the_traffic_class_is_that_of_the_priority_unless_one_is_named(priority: str, traffic_class: str) -> None:
    async with serving(says("x")) as cluster:
        submitted = cluster.workers["p0"].submitted
        await ask(cluster, "", priority=priority)
        assert submitted[-1].traffic_class == traffic_class
        await ask(cluster, "", headers={"X-Priority": priority})
        assert submitted[-1].traffic_class == traffic_class
        for named in ("decode", "prefill", "background"):
            await ask(cluster, "", priority=priority, traffic_class=named)
            assert submitted[-1].traffic_class == named


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("priority", "high", "priority is 'high', must be one of vip, normal, batch"),
        ("priority", 1, "priority is '1', must be one of vip, normal, batch"),
        ("priority", "", "priority is '', must be one of vip"),
        ("priority", ["vip"], 'priority is ["vip"], must be of type'),
        ("priority", True, "priority is true, must be of type"),
        ("priority", "x" * 5000, "must be one of vip, normal, batch"),
        ("ttft_slo_ms", 0, "ttft_slo_ms is 0.0, must be above 0 and at most 86400000"),
        ("ttft_slo_ms", -5, "ttft_slo_ms is -5.0, must be above 0"),
        ("tpot_slo_ms", 86_400_001, "tpot_slo_ms is 86400001.0, must be above 0 and at most 86400000"),
        ("deadline_ms", "100", 'deadline_ms is "100", must be of type float'),
        ("deadline_ms", 1e300, "must be above 0 and at most 86400000"),
    ],
)
async def test_what_is_wrong_in_the_body_is_named(path: str, field: str, value: Any, words: str) -> None:
    async with serving(says("x")) as cluster:
        found = error(await ask(cluster, "", path, **{field: value}), 400)
        assert (found["param"], found["code"]) == (field, "invalid_request")
        assert words in found["message"]
        assert len(found["message"]) < 300
        assert cluster.workers["p0"].submitted == []


@pytest.mark.parametrize(
    ("header", "value", "words"),
    [
        ("x-priority", "0", "x-priority is '0', must be one of vip, normal, batch"),
        ("x-ttft-slo-ms", "soon", "x-ttft-slo-ms is 'soon', must be a number of milliseconds above 0 and at most"),
        ("x-ttft-slo-ms", "nan", "must be a number of milliseconds above 0"),
        ("x-ttft-slo-ms", "inf", "must be a number of milliseconds"),
        ("x-ttft-slo-ms", "1e3", "must be a number of milliseconds"),
        ("x-tpot-slo-ms", "-1", "must be a number of milliseconds"),
        ("x-tpot-slo-ms", "0", "x-tpot-slo-ms is 0.0, must be above 0"),
        ("x-deadline-ms", "86400001", "x-deadline-ms is 86400001.0, must be above 0 and at most 86400000"),
    ],
)
async def test_what_is_wrong_in_a_header_is_named_unless_the_body_says_it(header: str, value: str, words: str) -> None:
    async with serving(says("x")) as cluster:
        found = error(await ask(cluster, "", headers={header: value}), 400)
        assert found["param"] == header
        assert words in found["message"]
        [refused] = await ask_on_nats(cluster, "", headers={header: value})
        assert refused["error"] == found
        assert (await ask(cluster, "", headers={header: value}, **(FIELDS | {"deadline_ms": 9e6}))).status_code == 200


async def test_a_priority_that_the_key_may_not_use_is_forbidden_with_those_it_may() -> None:
    keys = *KEYS, key("ends", priorities=("vip", "batch"), priority="batch")
    async with keyed(says("x"), *keys) as cluster:
        for name, may in (("plain", "normal, batch"), ("bulk", "batch"), ("ends", "vip, batch"), ("vip", "")):
            allowed = {p for p in PRIORITIES if p in may} if may else set(PRIORITIES)
            for priority in PRIORITIES:
                response = await ask(cluster, name, priority=priority)
                [on_nats] = await ask_on_nats(cluster, name, headers={"X-Priority": priority})
                if priority in allowed:
                    assert response.status_code == 200
                    assert "error" not in on_nats
                    continue
                found = error(response, 403)
                assert (found["type"], found["code"], found["param"]) == ("permission_error", "forbidden", "priority")
                assert f"which API key {name!r} may not use: it may use {may}" in found["message"]
                assert on_nats["error"]["code"] == "forbidden"
                assert on_nats["error"]["param"] == "x-priority"


async def test_openapi_has_the_fields_and_their_headers() -> None:
    async with serving(says("x")) as cluster, cluster.client() as client:
        document = (await client.get("/openapi.json")).json()
        for body in ("ChatBody", "CompletionBody", "GenerateBody"):
            properties = document["components"]["schemas"][body]["properties"]
            assert FIELDS.keys() <= properties.keys()
            assert "vip" in str(properties["priority"])
        for path in BODIES:
            names = {p["name"] for p in document["paths"][path]["post"]["parameters"]}
            promises = {"x-priority", "x-ttft-slo-ms", "x-tpot-slo-ms", "x-deadline-ms"}
            assert names == promises | {"x-session-id", "x-first-token"}
        assert "parameters" not in document["paths"]["/tokenize"]["post"]
