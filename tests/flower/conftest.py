"""These tests run where Flower is installed: `make test-flower`."""

from __future__ import annotations

import os
from importlib.util import find_spec

# On a machine that is busy with other tests, Ray's processes would wait for all of them: their own nice value is 15.
os.environ |= {"RAY_worker_niceness": "0"}

collect_ignore_glob = [] if find_spec("flwr") else ["test_*.py"]
