"""What a run of tests elsewhere is taken to have shown."""

from pathlib import Path

import pytest

from tests.roce.guest_tests import assert_all_passed, read_report

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="a" name="good" time="1.5"/>
<testcase classname="a" name="bad" time="0.1"><failure message="assert 1 == 2">the trace</failure></testcase>
<testcase classname="a" name="broken" time="0"><error message="no fixture">more</error></testcase>
<testcase classname="a" name="left out" time="0"><skipped message="no device">where</skipped></testcase>
<testcase classname="a" name="known" time="0"><skipped type="pytest.xfail" message="rxe can't"/></testcase>
</testsuite></testsuites>"""


def test_every_verdict_is_read_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(REPORT)
    outcomes = read_report(tmp_path / "x.xml")
    assert [o.verdict for o in outcomes] == ["passed", "failed", "error", "skipped", "expected"]
    assert outcomes[0].seconds == 1.5
    assert outcomes[1].text == "assert 1 == 2\nthe trace"
    for outcome, why in zip(outcomes[1:4], ("assert 1 == 2", "no fixture", "no device"), strict=True):
        with pytest.raises(AssertionError, match=why):
            assert_all_passed([outcomes[0], outcome], at_least=1)
    assert_all_passed([outcomes[0], outcomes[4]], at_least=1)
    assert_all_passed([outcomes[0], outcomes[3]], at_least=1, may_skip=["no device"])


def test_too_few_tests_prove_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(REPORT)
    good = [o for o in read_report(tmp_path / "x.xml") if o.verdict in ("passed", "expected")]
    assert_all_passed(good, at_least=1)
    with pytest.raises(AssertionError, match="only 1 tests passed"):
        assert_all_passed(good, at_least=2)
