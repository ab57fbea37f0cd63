"""A module that needs torch, run in a process of its own: the caller needs none, and keeps no memory.

Its last line of stdout is JSON: {"versions": ...} of what did it, or {"error": [code, message, fields]}.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from distserve.errors import DistServeError, FetchFailed, from_wire

_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def run_module(module: str, arguments: Sequence[str], doing: str, *, model: str, timeout_s: float) -> dict[str, str]:
    """The versions that it tells. `doing`: "converting x.gguf", for errors.

    Raises the error that it tells, and FetchFailed (stage "convert") if it tells none, is too slow, or failed by what
    is not ours, such as a missing package or a full disk.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=os.environ | _QUIET,
        )
    except subprocess.TimeoutExpired:
        raise FetchFailed(f"{doing} took more than {timeout_s:.0f} s", model=model, stage="convert") from None
    try:
        result = json.loads(done.stdout.strip().splitlines()[-1])
        if done.returncode == 0:
            return {str(k): str(v) for k, v in result["versions"].items()}
        code, message, fields = result["error"]
    except (IndexError, ValueError, KeyError, TypeError):
        reason = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise FetchFailed(
            f"{doing} failed (exit status {done.returncode}). It needs distserve[engine]. It said:\n{reason}",
            model=model,
            stage="convert",
        ) from None
    if code == DistServeError.code:
        raise FetchFailed(f"{doing} failed (it needs distserve[engine]): {message}", model=model, stage="convert")
    raise from_wire(code, message, fields)
