"""Where conversations ran."""

from distserve_gateway.affinity import Affinity
from distserve_gateway.costs import Place


def test_the_latest_place_counts_and_local_prefill_leaves_the_prefill_worker() -> None:
    affinity = Affinity()
    assert affinity.last("", "c") == Place()
    affinity.note("", "c", "p1", "d1")
    affinity.note("", "c", None, "d2")
    assert affinity.last("", "c") == Place("p1", "d2")


def test_tenants_do_not_share_names() -> None:
    affinity = Affinity()
    affinity.note("salt", "c", "p1", "d1")
    assert affinity.last("", "c") == Place()
    assert affinity.last("salt", "c") == Place("p1", "d1")


def test_the_longest_unused_is_forgotten_and_what_has_no_name_is_never_kept() -> None:
    affinity = Affinity(max_conversations=2)
    affinity.note("", "", "p", "d")
    for name in "aba":
        affinity.note("", name, "p", name)
    affinity.note("", "c", "p", "c")
    assert len(affinity) == 2
    assert affinity.last("", "b") == Place()
    assert affinity.last("", "a").decode_worker == "a"
