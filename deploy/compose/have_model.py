"""Has the model that the configuration names (model.path) ready in the cache folder, and ends: the services find it
there. What is to come from a hub the workers fetch themselves, each the first time."""

import os
import sys

from distserve.config import load_config
from distserve.errors import DistServeError
from distserve.models import resolve


def main() -> int:
    try:
        print(resolve(load_config(env=os.environ).model.path))
    except DistServeError as e:
        print(f"distserve: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
