"""What `distserve kv` prints for people."""

from distserve.kv_tables import duration, in_text, lines_of, table

TIER = {
    "num_blocks": 12_345,
    "num_bytes": 3 << 30,
    "capacity_bytes": 0,
    "num_hits": 7,
    "num_read_blocks": 6,
    "num_written_blocks": 5,
    "num_evicted": {"capacity": 2},
    "num_errors": 0,
    "state": "",
}
NODE = {
    "node": "kvstore-0",
    "status": "degraded",
    "model": "tiny",
    "uptime_s": 8040.0,
    "reasons": ["the disk is full"],
    "num_looked_up_blocks": 2000,
    "num_hit_blocks": 1500,
    "num_lookups": 10,
    "num_blocks": 12_345,
    "num_conversations": 3,
    "num_pinned": 0,
    "num_leases": 1,
    "layout": "abc",
    "tiers": {"disk": TIER},
}


def test_columns_are_as_wide_as_they_must_be_with_numbers_to_the_right() -> None:
    assert list(table(["name", "blocks"], [["a", "7"], ["long name", "1,024"]])) == [
        "name       blocks",
        "a               7",
        "long name   1,024",
    ]


def test_a_value_is_printed_with_the_unit_that_its_fields_name_says() -> None:
    assert in_text("num_bytes", 1536) == "1.5 KiB"
    assert in_text("idle_s", 75.0) == "1 min 15 s"
    assert in_text("num_blocks", 1_000_000) == "1,000,000"
    assert in_text("reasons", []) == in_text("state", "") == in_text("evicted", {}) == "-"
    assert in_text("num_evicted", {"capacity": 2000}) == "capacity 2,000"


def test_lengths_of_time_have_their_two_largest_units() -> None:
    assert [duration(s) for s in (0.4, 59, 3600, 8040, 90_000)] == ["0 s", "59 s", "1 h 0 min", "2 h 14 min", "1 d 1 h"]


def test_rows_of_one_kind_make_a_table_and_a_field_that_one_lacks_is_a_dash() -> None:
    lines = list(lines_of([{"node": "a", "num_blocks": 1}, {"node": "b"}]))
    assert lines == ["node  blocks", "a          1", "b          -"]


def test_a_nodes_statistics_say_what_is_wrong_and_have_a_row_for_each_tier() -> None:
    lines = list(lines_of([NODE]))
    assert lines[0] == "kvstore-0: degraded, model tiny, up 2 h 14 min"
    assert "  ! the disk is full" in lines
    [tier] = [line for line in lines if line.startswith("  disk ")]
    assert all(part in tier for part in ("12,345", "3.0 GiB", "no limit", "capacity 2"))


def test_who_could_not_answer_stands_last() -> None:
    lines = list(lines_of([{"node": "x", "status": "gone", "error": "no answer"}, NODE]))
    assert lines[-1] == "x (gone): no answer"
