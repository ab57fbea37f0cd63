"""What is put into stores: sizes, and how they fall into requests."""

import pytest

from benchmarks.store_values import MIB, SIZES, Load


@pytest.mark.parametrize(("label", "num_bytes"), [("64KiB", 1 << 16), ("1MiB", 1 << 20), ("16MiB", 1 << 24)])
def test_a_value_is_as_large_as_its_name_says(label: str, num_bytes: int) -> None:
    assert SIZES[label].value_bytes == num_bytes


@pytest.mark.parametrize(("label", "num_requests", "num_values"), [("64KiB", 64, 64), ("1MiB", 4, 64), ("16MiB", 4, 4)])
def test_a_request_is_64_values_or_64_mib(label: str, num_requests: int, num_values: int) -> None:
    requests = Load(SIZES[label], 256 * MIB).requests()
    assert [len(values) for values in requests] == [num_values] * num_requests
    assert [i for values in requests for i in values] == list(range(num_requests * num_values))


def test_bytes_that_are_not_whole_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="whole requests of 16MiB"):
        Load(SIZES["16MiB"], 96 * MIB)
