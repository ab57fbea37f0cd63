#!/usr/bin/env python3
"""Writes ../dashboards/*.json from the definitions here; with --check it says instead which are not current."""

import json
import sys
from pathlib import Path

import disaggregation
import kv_store
import overview
import slo
from dashboard import Dashboard

OUT = Path(__file__).resolve().parents[1] / "dashboards"
FILES: dict[str, Dashboard] = {
    "overview": overview.DASHBOARD,
    "disaggregation": disaggregation.DASHBOARD,
    "kv-store": kv_store.DASHBOARD,
    "slo": slo.DASHBOARD,
}


def main() -> int:
    texts = {name: json.dumps(dashboard.json(), indent=1) + "\n" for name, dashboard in FILES.items()}
    if "--check" in sys.argv[1:]:
        stale = [
            n
            for n, text in texts.items()
            if not (OUT / f"{n}.json").is_file() or (OUT / f"{n}.json").read_text() != text
        ]
        if stale:
            print(f"not current: {', '.join(stale)}; run {Path(__file__).name}", file=sys.stderr)
        return 1 if stale else 0
    for name, text in texts.items():
        (OUT / f"{name}.json").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
