"""Where the fallback server is, and the key that it asks for."""

import pytest

from distserve import cli
from distserve.config import BreakerConfig, load_config
from distserve.errors import ConfigError
from distserve_gateway.admission import Admission
from distserve_gateway.fallback import Fallback


@pytest.mark.parametrize("url", ["10.0.0.9:8000", "ftp://x", "http://", "http:// x", "http://x?k=1", "http://x/v1#k"])
def test_what_is_no_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"http://HOST:PORT or https://") as refused:
        load_config(None, {"DISTSERVE_BREAKER_FALLBACK_URL": url})
    assert refused.value.key == "breaker.fallback_url"


def test_what_only_looks_like_one_is_refused_too() -> None:
    with pytest.raises(ConfigError) as refused:
        Fallback(BreakerConfig(fallback_url="http://user:secret@x:secret"), "m", Admission(1))
    assert refused.value.key == "breaker.fallback_url"
    assert "secret" not in refused.value.message
    assert refused.value.__suppress_context__, "nor in a traceback"


@pytest.mark.parametrize("user", ["user:s3cret@", "s3cret@", "s3cret:a@b@"])
def test_config_show_keeps_its_user_and_password_to_itself(
    user: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTSERVE_BREAKER_FALLBACK_URL", f"http://{user}10.0.0.9:8000/base@1")
    cli.config_show()
    shown = capsys.readouterr()
    assert "s3cret" not in shown.out + shown.err
    assert "fallback_url: http://10.0.0.9:8000/base@1" in shown.out
    assert "left out" in shown.err


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://10.0.0.9:8000", "10.0.0.9:8000"),
        ("http://10.0.0.9:8000/v1/", "10.0.0.9:8000"),
        ("https://user:secret@llm.example/base", "llm.example"),
    ],
)
async def test_it_is_named_without_what_may_be_secret(url: str, name: str) -> None:
    async with Fallback(BreakerConfig(fallback_url=url), "m", Admission(1)) as fallback:
        assert fallback.name == name
        assert fallback.model == "m"
        assert "secret" not in fallback.unavailable("is away").message


@pytest.mark.parametrize("key", ["two words", "schlüssel", "line\n"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Fallback(BreakerConfig(fallback_url="http://x", fallback_key=key), "m", Admission(1))
    assert refused.value.key == "breaker.fallback_key"
    assert key not in refused.value.message
