"""Times `pack` of rollouts with the log-probs of their tokens, and counts their bytes.

    python benchmarks/rollouts.py                    # 10,000 rollouts; a minute

Records are JSON lines of token ids, and have a log-prob for each token of the response.
They are packed with the log-probs left out (`ignore`), and kept (`token_values`), in
this process alone. Times are of the processor, the least of several.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, parser, provenance, save, show

import packstore
from packstore.torch import open_side

PROMPT, RESPONSE, VOCABULARY = 100, 200, 30_000
WAYS: dict[str, dict[str, Any]] = {
    "left out": {"ignore": ["logprobs"]},
    "kept": {"token_values": {"old_logps": "logprobs"}},
}


def write_rollouts(path: Path, count: int) -> None:
    """Write rollouts, their log-probs as a sampler's float32."""
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            logps = -random.exponential(0.5, RESPONSE).astype(np.float32)
            record = {
                "prompt_ids": random.integers(VOCABULARY, size=PROMPT).tolist(),
                "response_ids": random.integers(VOCABULARY, size=RESPONSE).tolist(),
                "logprobs": logps.tolist(),
            }
            file.write(json.dumps(record) + "\n")


def measure(source: Path, repeats: int) -> list[dict[str, Any]]:
    """Return seconds and bytes of each way."""
    rows = []
    for name, settings in WAYS.items():
        seconds = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder, "rollouts")
                start = time.process_time()
                dataset = packstore.pack(source, str(out), num_workers=0, **settings)
                seconds.append(time.process_time() - start)
                values = Path(f"{out}-values", dataset.manifest.lineage)
                stored = open_side(str(values)) if values.exists() else None
        tokens = dataset.manifest.totals.supervised_tokens
        bytes_of_values = sum(s.bytes for s in stored.manifest.shards) if stored else 0
        rows.append(
            {
                "log-probs": name,
                "seconds": min(seconds),
                "supervised_tokens": tokens,
                "bytes_per_token": bytes_of_values / tokens,
                "pack_bytes_per_token": dataset.manifest.totals.bytes / tokens,
            }
        )
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rollouts", type=int, default=10_000)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--out", default=RESULTS / "rollouts.json")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "rollouts.jsonl")
        write_rollouts(source, args.rollouts)
        input_bytes = source.stat().st_size
        rows = measure(source, args.repeats)
    environment = provenance("numpy", "pyarrow", "msgspec")
    result = {"environment": environment, "input_bytes": input_bytes, "packed": rows}
    save(args.out, result)
    show(rows[0], (row.values() for row in rows), f"{input_bytes:,} bytes of records")


if __name__ == "__main__":
    main()
