"""Counted figures: those expected of every timed case of the plan, and the run on an
H200 taken apart.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from common import RESULTS, provenance, save

from gpu.parts import LENGTHS, profile_rows, uniform
from gpu.plan import groups
from gpu.predictions import (
    ATTENTION_KERNELS,
    CEILINGS,
    MODELS,
    PEAK,
    REFERENCE,
    Work,
    count_attention,
    count_head,
    count_step,
)
from gpu.rounds import OURS, Group, Round, expected_training, parse_way
from gpu.sizes import GPU, PROFILES, TURNS, lengths, segments_of

STORED_RUN = RESULTS / "gpu_session.json"

STORED_COPIED_KEY_BYTES = 32
"""Bytes that an element of a copied key moved when the stored run was made: the sums
of gradients were in float32, by ``index_add``.
"""

STORED_WAYS = (
    ("llama-1.2b", "hh", "shared_prefix/triton", True),
    ("llama-1.2b", "hh", "padding_free/triton", True),
    ("llama-1.2b", "hh", "shared_prefix/triton", False),
    ("llama-1.2b", "hh", "padding_free/triton", False),
    ("qwen3-0.6b", "ultrafeedback", "shared_prefix/triton", True),
)
"""Cases of the stored run: model, profile, way, whether layers are compiled."""

PROFILED = ("qwen3-0.6b", "hh", "shared_prefix/triton", True)
"""The profiled case of the stored run: the first micro-batch of its round."""

Figures = dict[str, float]


def stored_results() -> dict[str, Any]:
    """Return the cases of the stored run by name."""
    results: dict[str, Any] = json.loads(STORED_RUN.read_text(encoding="utf-8"))
    return results["results"]  # type: ignore[no-any-return]


def stored_ceilings() -> dict[str, float]:
    """Return the rates of the H200 in the stored run."""
    measured = stored_results()["ceilings"]
    return {name: measured[name] for name in CEILINGS}


def ratios(is_compiled: bool) -> dict[tuple[str, str], Figures]:
    """Return the pairs that kernels process in a second with shared prefixes and the
    Triton head, over those of other ways.

    By model and length profile, then by way: the head of padding-free batches, with the
    same layers, or ``trainer``: TRL's with its defaults, 8 random pairs padded, eager
    layers, and a reference in each step, which ours has read from a file.
    """
    result = {}
    for name, config in MODELS.items():
        for profile in PROFILES:
            if profile in TURNS:
                continue
            rows = lengths(profile, 4000, GPU.longest[profile])
            seconds = {}
            flat = segments_of(rows, "padding_free")
            for head in ("triton", "trl", "logits"):
                work = count_step(config, flat, head, is_compiled=is_compiled)
                seconds[head] = work.device_seconds()
            default = sum(
                count_step(config, segments_of(run, "padded"), "trl").device_seconds()
                for run in np.split(rows, len(rows) // 8)
            )
            seconds["trainer"] = default * (1 + REFERENCE)
            shared = segments_of(rows, "shared_prefix")
            ours = count_step(config, shared, "triton", is_compiled=is_compiled)
            result[name, profile] = {
                way: x / ours.device_seconds() for way, x in seconds.items()
            }
    return result


class StoredCase:
    """A case of the stored run, beside its count at the measured ceilings.

    Args:
        model, profile, way, is_compiled: of the case, see :data:`STORED_WAYS`.
    """

    def __init__(self, model: str, profile: str, way: str, is_compiled: bool) -> None:
        group = Group(model, profile, 8192, (way,), 0, is_compiled)
        self.name = group.case(way)
        self.ceilings = stored_ceilings()
        self.round = Round(GPU, group)
        packing, head, *_ = parse_way(way)
        self.works = [
            count_step(
                self.round.config,
                segments_of(rows, packing),
                head,
                is_compiled=is_compiled,
                copied_key_bytes=STORED_COPIED_KEY_BYTES,
            )
            for rows in self.round.batch_rows(packing)
        ]

    def milliseconds(self) -> Figures:
        """Return the counted milliseconds of a micro-batch by part, on average."""
        parts: Figures = {}
        for work in self.works:
            for name, seconds in work.parts(self.ceilings).items():
                milliseconds = 1e3 * seconds / len(self.works)
                parts[name] = parts.get(name, 0) + milliseconds
        return parts

    def measured_milliseconds(self) -> float:
        """Return the measured milliseconds of a micro-batch, on average."""
        rate = stored_results()[self.name]["pairs_per_second"]
        return float(1e3 * self.round.num_pairs / rate / len(self.works))


def at_the_limit(works: list[Work], num_pairs: int, share: float = 0.95) -> Figures:
    """Return pairs a second and MFU at a share of the limit, see :meth:`Work.limit`."""
    seconds = sum(work.limit(stored_ceilings()) for work in works) / share
    operations = sum(work.needed for work in works)
    return {
        "pairs_per_second": num_pairs / seconds,
        "mfu": operations / seconds / PEAK,
    }


def expected_of_group(group: Group) -> dict[str, Figures]:
    """Return the figures of whole models by case, and those at 95 % of the limit."""
    ceilings = stored_ceilings()
    pairs = Round(GPU, group)
    cases = {}
    for name in group.ways:
        way = parse_way(name)
        works = pairs.work(way)
        rate = pairs.expected_rate(way, ceilings)
        limit = at_the_limit(works, pairs.num_pairs)
        cases[group.case(name)] = {
            "pairs_per_second": rate,
            "ms": 1e3 * pairs.num_pairs / rate / len(works),
            "device_ms": 1e3
            * sum(w.device_seconds(ceilings) for w in works)
            / len(works),
            "host_ms": 1e3 * sum(w.host_seconds for w in works) / len(works),
            "mfu": pairs.needed(way) / PEAK * rate / pairs.num_pairs,
            "limit_pairs_per_second": limit["pairs_per_second"],
            "limit_mfu": limit["mfu"],
        }
    ours = cases[group.case(OURS)]["pairs_per_second"]
    cases[group.ratio_case] = {
        f"over {name}": ours / cases[group.case(name)]["pairs_per_second"]
        for name in group.ways
        if name != OURS
    }
    return cases


def expected_of_heads() -> dict[str, Figures]:
    """Return the milliseconds of each route of the head, see ``parts.heads``."""
    cases = {}
    num_rows = GPU.head_tokens[1]
    for vocab, width in GPU.head_shapes:
        for name in ("triton", "eager", "trl", "logits"):
            counted_name = "logsumexp" if name == "logits" else name
            work = count_head(num_rows, vocab, width, counted_name)
            milliseconds = 1e3 * work.device_seconds(stored_ceilings())
            cases[f"head/{vocab}x{width}/{name}"] = {"ms": milliseconds}
    return cases


def expected_of_attention() -> dict[str, Figures]:
    """Return the milliseconds of a layer's attention, see ``parts.time_attention``."""
    rows = {
        f"attention of {profile}": segments_of(
            profile_rows(GPU, profile), "shared_prefix"
        )
        for profile in PROFILES
    }
    for length in LENGTHS:
        rows[f"attention by length {length}"] = uniform(length, GPU.tokens[-1])
    cases = {}
    for name, segments in rows.items():
        for backend in GPU.timed_backends:
            if backend not in ATTENTION_KERNELS:
                continue
            for model in GPU.timed_models:
                _, config = GPU.models[model]
                work = count_attention(config, segments, backend)
                milliseconds = 1e3 * work.device_seconds(stored_ceilings())
                cases[f"{name}/{backend}/{model}"] = {"both_ms": milliseconds}
    return cases


def expected_of_profiles() -> dict[str, Figures]:
    """Return the figures of the profiles."""
    cases = {}
    for model in GPU.timed_models:
        group = Group(model, "hh", GPU.tokens[0], (OURS,), 0)
        work = Round(GPU, group).work(parse_way(OURS))[0]
        cases[f"profile/{model}/{OURS}/compiled"] = {
            "ms": 1e3 * work.device_seconds(stored_ceilings()),
            "wall_ms": 1e3 * work.seconds(stored_ceilings()),
            "kernels": work.kernels,
        }
    return cases


def expected_of_training() -> dict[str, Figures]:
    """Return the rates of the trainers; that of TRL's was measured on the H200."""
    rates = expected_training(GPU, stored_ceilings())
    rates["trl"] = stored_results()["train/trl"]["pairs_per_second"]
    return {f"train/{way}": {"pairs_per_second": x} for way, x in rates.items()}


def expected_cases() -> dict[str, Figures]:
    """Return the figures that are expected of every timed case, by its name."""
    cases: dict[str, Figures] = {}
    for group in groups(GPU):
        cases |= expected_of_group(group)
    return {
        **cases,
        **expected_of_training(),
        **expected_of_heads(),
        **expected_of_attention(),
        **expected_of_profiles(),
    }


def rounded(cases: dict[str, Figures]) -> dict[str, Figures]:
    """Return the cases with four digits a figure."""
    return {
        name: {figure: float(f"{value:.4g}") for figure, value in figures.items()}
        for name, figures in cases.items()
    }


def show(path: str) -> None:
    """Print what is counted, and write expected figures to `path`, unless it is -."""
    print("counted, kernels only, for an H100: pairs a second with shared prefixes")
    for is_compiled in (True, False):
        for names, over in ratios(is_compiled).items():
            layers = "compiled" if is_compiled else "eager"
            columns = [f"over {way} {x:.2f}" for way, x in over.items()]
            print("{:14}{:15}".format(*names), f"{layers:10}", *columns)

    print("\nthe run on an H200: milliseconds of a micro-batch, counted by part")
    for arguments in STORED_WAYS:
        case = StoredCase(*arguments)
        parts = case.milliseconds()
        limit = at_the_limit(case.works, case.round.num_pairs)
        print(f"{case.name}: measured {case.measured_milliseconds():.1f}, ", end="")
        print(f"counted {sum(parts.values()):.1f}:", end=" ")
        print(", ".join(f"{name} {x:.1f}" for name, x in parts.items()))
        print(
            f"  at 95 % of the limit {limit['pairs_per_second']:.0f} pairs/s, ", end=""
        )
        print(f"MFU {limit['mfu']:.3f}")

    cases = rounded(expected_cases())
    print("\nexpected on an H200, by case")
    for name, figures in cases.items():
        print(f"{name}:", *(f"{figure} {value}" for figure, value in figures.items()))
    if path != "-":
        result = {
            "about": "counted before any of it was measured, by --counted",
            "ceilings": stored_ceilings(),
            **provenance("packstore"),
            "expected": cases,
        }
        save(path, result)
