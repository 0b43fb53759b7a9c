"""Make rollouts of agents, and measure what trees of prefixes save, there and on real data.

    python benchmarks/agents.py --data ../shared/data \\
        --tokenizer ../shared/data/tokenizers/qwen3          # --quick: small, to see that it runs
    python benchmarks/agents.py --write rollouts.jsonl --view turns        # only makes records

A rollout has a system prompt, tool schemas, a question, and turns: an answer with a call of a tool,
and its result. Rollouts of a task have its question in common; some fork from another after a few
turns. All tasks have the same system prompt and tools. There are two views of a rollout, each as
chats or as token ids:

    turns          a record for each turn: its context is the prompt, only its answer is learned
    trajectories   a record for the whole rollout, all answers are learned

For each set of records, as `packstore.pack` counts them:

    concat      tokens of all sequences
    one_level   tokens if a sequence may only leave out what its example's first one begins with
    example     layout shared_prefix: prefixes are shared inside an example
    pack        the same with `share_prefixes="pack"`: over all examples of a pack

Beside them the packs of each, and those that `packstore.estimate` expects; of turns, the tokens of
`pack` in packs of half and of twice the size. Then CPU seconds of a forward and backward pass of a model
of four layers over the same examples in each way (one thread, `sdpa`, the least of some runs by
turns): packs of `pack` drawn at random, and their examples packed in the other ways; of generated
rollouts, in a set of short ones (`short_turns`) unless `--time-all` asks for all. Last the CPU
milliseconds in which `pack_in_memory` packs 512 rollouts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, parser, provenance, records, save, show

import packstore
import packstore.torch as pt
from packstore.format.arrays import Examples, Int32, Packs, to_offsets
from packstore.format.seeds import permutation
from packstore.pack.fill import fill, unpack
from packstore.pack.layout import sizes as stored_sizes

SEED = 0
WAYS = ("concat", "one_level", "example", "pack")

Message = dict[str, Any]
Record = dict[str, Any]

WORDS = string.ascii_letters
"""Words of the generated texts: most tokenizers have a token for a space and a letter."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of generated rollouts; the numbers of words are medians.

    Attributes:
        tasks: questions.
        turns: answers of a rollout.
        forks: turns that the further rollouts of a task share with its first one, one
            number for each; 0: only the question.
        system, tool, question, answer, result: words of the system prompt, the
            description of a tool, a question, an answer and the result of a call.
        tools: tool schemas.
        spread: standard deviation of the logarithm of these numbers of words.
    """

    tasks: int = 8
    turns: int = 12
    forks: tuple[int, ...] = (0, 3, 6, 9)
    system: int = 400
    tools: int = 6
    tool: int = 100
    question: int = 80
    answer: int = 200
    result: int = 600
    spread: float = 0.4


SHORT = Sizes(
    tasks=12,
    turns=6,
    forks=(0, 2, 4),
    system=120,
    tool=20,
    question=30,
    answer=50,
    result=120,
)
"""Rollouts of a length that a CPU trains on in seconds."""


@dataclass(frozen=True)
class Turn:
    """An answer with a call, and the result of the call, each as numbers of words."""

    answer: tuple[int, ...]
    result: tuple[int, ...]


@dataclass(frozen=True)
class Rollout:
    """The turns that one rollout of a task takes, and its reward."""

    task: int
    question: tuple[int, ...]
    turns: tuple[Turn, ...]
    reward: float


@dataclass(frozen=True)
class Rollouts:
    """Generated rollouts.

    Attributes:
        system: the system prompt of all of them.
        tools: the descriptions of the tools.
        rollouts: the rollouts, task by task.
    """

    system: tuple[int, ...]
    tools: tuple[tuple[int, ...], ...]
    rollouts: tuple[Rollout, ...]


def draw_rollouts(sizes: Sizes, seed: int = SEED) -> Rollouts:
    """Draw rollouts; the same for the same sizes and seed."""
    rng = np.random.default_rng(seed)

    def draw(median: int) -> tuple[int, ...]:
        count = max(2, round(median * float(np.exp(sizes.spread * rng.normal()))))
        return tuple(rng.integers(0, len(WORDS), count).tolist())

    def draw_turns(count: int) -> tuple[Turn, ...]:
        return tuple(Turn(draw(sizes.answer), draw(sizes.result)) for _ in range(count))

    system = draw(sizes.system)
    tools = tuple(draw(sizes.tool) for _ in range(sizes.tools))
    rollouts = []
    for task in range(sizes.tasks):
        question = draw(sizes.question)
        first_turns = draw_turns(sizes.turns)
        all_turns = [first_turns]
        for fork in sizes.forks:
            all_turns.append(first_turns[:fork] + draw_turns(sizes.turns - fork))
        for turns in all_turns:
            rollouts.append(Rollout(task, question, turns, float(rng.integers(0, 2))))
    return Rollouts(system, tools, tuple(rollouts))


def unique_turns(rollouts: Rollouts) -> Iterator[tuple[Rollout, int]]:
    """Yield a rollout and the index of a turn, for each turn once.

    The turns that a fork shares with the first rollout of its task are its, too.
    """
    seen = set()
    for rollout in rollouts.rollouts:
        for number in range(len(rollout.turns)):
            beginning = (
                rollout.question,
                rollout.turns[:number],
                rollout.turns[number].answer,
            )
            if beginning not in seen:
                seen.add(beginning)
                yield rollout, number


def text(numbers: Sequence[int]) -> str:
    """Return numbers as text."""
    return " ".join(WORDS[number] for number in numbers)


def chat(rollouts: Rollouts, rollout: Rollout, num_turns: int) -> list[Message]:
    """Return the messages of a rollout before turn `num_turns`, in OpenAI's form."""
    messages: list[Message] = [
        {"role": "system", "content": text(rollouts.system)},
        {"role": "user", "content": text(rollout.question)},
    ]
    for number in range(num_turns):
        messages.append(answer_message(rollout, number))
        result = {"role": "tool", "tool_call_id": f"call_{number}"}
        messages.append(result | {"content": text(rollout.turns[number].result)})
    return messages


def answer_message(rollout: Rollout, number: int) -> Message:
    """Return an answer: words, then a call with half of them; the last has no call."""
    words = rollout.turns[number].answer
    if number == len(rollout.turns) - 1:
        return {"role": "assistant", "content": text(words)}
    half = len(words) // 2
    function = {
        "name": f"tool_{words[0] % 6}",
        "arguments": json.dumps({"query": text(words[half:])}),
    }
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": text(words[:half]), "tool_calls": [call]}


def tool_schemas(rollouts: Rollouts) -> list[Message]:
    """Return the tools in OpenAI's form."""
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": text(words),
                "parameters": parameters,
            },
        }
        for number, words in enumerate(rollouts.tools)
    ]


def turn_chats(rollouts: Rollouts) -> Iterator[Record]:
    """Yield a record for each turn: the chat before it, and its answer."""
    tools = tool_schemas(rollouts)
    for rollout, number in unique_turns(rollouts):
        yield {
            "prompt": chat(rollouts, rollout, number),
            "response": [answer_message(rollout, number)],
            "tools": tools,
        }


def trajectory_chats(rollouts: Rollouts) -> Iterator[Record]:
    """Yield a record for each rollout, whose answers are all learned."""
    tools = tool_schemas(rollouts)
    for rollout in rollouts.rollouts:
        last = len(rollout.turns) - 1
        messages = [*chat(rollouts, rollout, last), answer_message(rollout, last)]
        yield {"messages": messages, "tools": tools}


def message_ids(role: int, numbers: Sequence[int]) -> list[int]:
    """Return a message as token ids: its role, its words, and an end."""
    return [role, *(number + 5 for number in numbers), 4]


def prompt_ids(rollouts: Rollouts, rollout: Rollout) -> list[int]:
    """Return system prompt, tools and question as token ids."""
    ids = message_ids(0, rollouts.system)
    for tool in rollouts.tools:
        ids += message_ids(0, tool)
    return ids + message_ids(1, rollout.question)


def turn_ids(
    rollouts: Rollouts,
) -> Iterator[tuple[list[int], list[list[int]], list[float]]]:
    """Yield a record of :func:`packstore.torch.pack_in_memory` for each turn."""
    for rollout, number in unique_turns(rollouts):
        context = prompt_ids(rollouts, rollout)
        for turn in rollout.turns[:number]:
            context += message_ids(2, turn.answer) + message_ids(3, turn.result)
        answer = message_ids(2, rollout.turns[number].answer)
        yield [*context, answer[0]], [answer[1:]], [rollout.reward]


def answer_ids(
    rollouts: Rollouts,
) -> Iterator[tuple[list[int], list[list[int]], list[float]]]:
    """Yield a record for each task: its prompt, and the first answers of its rollouts."""
    for group in rollouts_by_task(rollouts):
        answers = [message_ids(2, rollout.turns[0].answer) for rollout in group]
        prompt = [*prompt_ids(rollouts, group[0]), answers[0][0]]
        rewards = [rollout.reward for rollout in group]
        yield prompt, [answer[1:] for answer in answers], rewards


def rollouts_by_task(rollouts: Rollouts) -> list[list[Rollout]]:
    """Return the rollouts of each task."""
    tasks: dict[int, list[Rollout]] = {}
    for rollout in rollouts.rollouts:
        tasks.setdefault(rollout.task, []).append(rollout)
    return list(tasks.values())


def trajectory_ids(rollouts: Rollouts) -> Iterator[Record]:
    """Yield the record of a task: all of its rollouts, whose answers are learned."""
    for group in rollouts_by_task(rollouts):
        responses, labels = [], []
        for rollout in group:
            response: list[int] = []
            label: list[int] = []
            for turn in rollout.turns:
                answer, result = (
                    message_ids(2, turn.answer),
                    message_ids(3, turn.result),
                )
                response += answer + result
                label += [-100, *answer[1:]] + [-100] * len(result)
            responses.append(response)
            labels.append(label)
        yield {
            "prompt": prompt_ids(rollouts, group[0]),
            "responses": responses,
            "response_labels": labels,
            "scores": [rollout.reward for rollout in group],
        }


@dataclass(frozen=True)
class Case:
    """A set of records.

    Attributes:
        read: returns the records.
        pack_size: tokens of a pack.
        other_pack_sizes: for which the tokens of `pack` are counted, too.
        is_timed: whether steps are timed.
        settings: further settings of `packstore.pack`.
    """

    read: Callable[[], Iterator[Record]]
    pack_size: int = 8192
    other_pack_sizes: tuple[int, ...] = ()
    is_timed: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


def turns_of_chats(path: Path) -> Iterator[Record]:
    """Yield a record for each answer of each chat of a file: the chat up to it."""
    for row in records(path):
        for number, message in enumerate(row["messages"]):
            if message["role"].startswith("assistant"):
                yield {"messages": row["messages"][: number + 1], "tools": row["tools"]}


def real_cases(data: Path) -> dict[str, Case]:
    """Return the sets of real data, by name."""
    pairs, sft = data / "pairs", data / "sft"
    only_last: dict[str, Any] = {"supervised_turns": "last"}
    return {
        "hh_harmless": Case(lambda: records(pairs / "hh_harmless.jsonl.gz")),
        "chat_en": Case(lambda: records(pairs / "chat_en.jsonl")),
        "oasst": Case(lambda: records(data / "ranked" / "oasst_k2_6.jsonl")),
        "pandalm": Case(lambda: records(pairs / "pandalm_scored.jsonl")),
        "tool_pairs": Case(lambda: records(pairs / "toolcall_zh.jsonl")),
        "tool_chats": Case(lambda: records(sft / "toolcall_en.jsonl")),
        "tool_turns": Case(
            lambda: turns_of_chats(sft / "toolcall_en.jsonl"), settings=only_last
        ),
    }


def generated_cases(sizes: Sizes, time_all: bool) -> dict[str, Case]:
    """Return both views of generated rollouts, and the turns of shorter ones."""
    rollouts = draw_rollouts(sizes)
    short = draw_rollouts(SHORT)
    other_sizes: dict[str, Any] = {"other_pack_sizes": (16_384, 65_536)}
    return {
        "short_turns": Case(lambda: turn_chats(short)),
        "turns": Case(
            lambda: turn_chats(rollouts), 32_768, is_timed=time_all, **other_sizes
        ),
        "trajectories": Case(
            lambda: trajectory_chats(rollouts), 32_768, is_timed=time_all
        ),
    }


def one_level(examples: Examples) -> tuple[Int32, Int32]:
    """Return what sequences leave out if they may share with their example's first one.

    The shared part ends before the first supervised token of either, and its last token
    is stored once more.

    Returns:
        int32 `[S]`, the number of leading tokens that each sequence omits; int32 `[S]`,
        how many sequences before it the first one stands, 0 where it omits none.
    """
    ids = np.split(examples.input_ids, examples.sequence_offsets[1:-1])
    supervised = np.split(examples.supervised, examples.sequence_offsets[1:-1])
    prompts = [int(flags.argmax()) for flags in supervised]
    omitted = np.zeros(len(ids), np.int32)
    distances = np.zeros(len(ids), np.int32)
    for start, end in itertools.pairwise(examples.example_offsets.tolist()):
        for i in range(start + 1, end):
            limit = min(prompts[start], prompts[i])
            differs = np.flatnonzero(ids[start][:limit] != ids[i][:limit])
            shared = int(differs[0]) if len(differs) else limit
            if shared > 1:
                omitted[i] = shared - 1
                distances[i] = i - start
    return omitted, distances


def example_sizes(examples: Examples, omitted: Int32) -> Int32:
    """Return the tokens that examples store, int32 `[E]`."""
    edges = to_offsets(examples.lengths - omitted)
    return np.diff(edges[examples.example_offsets]).astype(np.int32)


def without_beginnings(pack: Packs) -> Packs:
    """Return one pack of layout concat, without what sequences share with the first of
    their example.
    """
    omitted, distances = one_level(unpack(pack))
    first_stored = np.repeat(pack.seq_boundaries[:-1] + omitted, pack.lengths)
    is_stored = np.arange(len(pack.signed_ids)) >= first_stored
    boundaries = to_offsets(pack.lengths - omitted)
    return replace(
        pack,
        signed_ids=pack.signed_ids[is_stored],
        seq_boundaries=boundaries.astype(np.int32),
        parent_distances=distances,
        token_offsets=boundaries[[0, -1]],
    )


def filled_packs(examples: Examples, way: str, pack_size: int) -> list[Packs]:
    """Return examples in packs, in a way that shares nothing across examples."""
    omitted, _ = one_level(examples)
    if way == "concat":
        tokens = example_sizes(examples, np.zeros_like(omitted))
    elif way == "one_level":
        tokens = example_sizes(examples, omitted)
    else:
        tokens = stored_sizes(examples, "shared_prefix")
    plan = packstore.plan(tokens, pack_size=pack_size)
    layout = "shared_prefix" if way == "example" else "concat"
    packs = fill(examples, plan.offsets, layout, plan.order)
    rows = [packs.row(i) for i in range(len(packs))]
    if way == "one_level":
        rows = [without_beginnings(row) for row in rows]
    return rows


def small_model(vocabulary: int) -> Any:
    """Return a model of four layers like Qwen3's, its head a third of their size."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1 << 16,
    )
    return pt.use_packed_attention(Qwen3ForCausalLM(config), backend="sdpa")


VOCABULARY = 4096
"""Token ids are taken modulo this number for the model: a head for all of Qwen3's ids
would be larger than its layers, which in a model of usual size are larger.
"""


def with_small_ids(pack: Packs) -> Packs:
    """Return a pack with ids modulo :data:`VOCABULARY`; equal tokens stay equal."""
    ids = pack.input_ids % VOCABULARY
    return replace(pack, signed_ids=np.where(pack.supervised, ids, ~ids))


def choose_packs(dataset: packstore.Dataset, most_tokens: int) -> list[Packs]:
    """Return packs drawn at random, until their sequences have so many tokens."""
    rows = [packs.row(i) for packs in dataset.iter_packs() for i in range(len(packs))]
    chosen, tokens = [], 0
    for number in permutation(len(rows), SEED).tolist():
        if tokens < most_tokens:
            chosen.append(rows[number])
            tokens += int(rows[number].lengths.sum())
    return chosen


def run_step(model: Any, batches: list[pt.PackedBatch]) -> float:
    """Return the sum of all log-probs, after a forward and a backward pass."""
    total = 0.0
    for batch in batches:
        logps = pt.packed_logps(model, batch, per_token=True).sum()
        logps.backward()
        total += float(logps.detach())
    model.zero_grad()
    return total


def measure_steps(
    dataset: packstore.Dataset, kind: str, most_tokens: int, rounds: int
) -> dict[str, Any]:
    """Return CPU seconds of a step over the same examples, by way, and its tokens."""
    pack_size = dataset.manifest.pack_size
    chosen = choose_packs(dataset, most_tokens)
    examples = Examples.concat([unpack(pack) for pack in chosen])
    packs = {way: filled_packs(examples, way, pack_size) for way in WAYS[:-1]}
    packs["pack"] = chosen
    batches = {
        way: [pt.collate(with_small_ids(pack), kind) for pack in rows]
        for way, rows in packs.items()
    }

    tokens = {way: sum(batch.num_tokens for batch in batches[way]) for way in WAYS}
    timed = [way for way in WAYS if way == "concat" or tokens[way] < tokens["concat"]]

    model = small_model(VOCABULARY)
    least: dict[str, float] = {}
    sums = []
    for _ in range(rounds):
        for way in timed:
            started = time.process_time()
            sums.append(run_step(model, batches[way]))
            seconds = time.process_time() - started
            least[way] = min(seconds, least.get(way, seconds))
    assert max(sums) - min(sums) < 1e-5 * abs(sums[0]), "the ways must agree"
    for way in WAYS:  # that leave out nothing: their packs are those of `concat`
        least.setdefault(way, least["concat"])
    return {
        "commit": provenance()["commit"],
        "examples": examples.num_examples,
        "tokens": tokens,
        "keys": int(examples.lengths.sum()),
        "seconds": {way: round(least[way], 3) for way in WAYS},
        "tokens_fewer": {way: tokens["concat"] / tokens[way] for way in WAYS},
        "times_faster": {way: least["concat"] / least[way] for way in WAYS},
    }


def estimated_packs(dataset: packstore.Dataset, pack_size: int, share: str) -> int:
    """Return the packs of layout shared_prefix that `packstore.estimate` expects."""
    report = packstore.estimate(
        dataset,
        pack_sizes=[pack_size],
        layouts=["shared_prefix"],
        share_prefixes=share,
    )
    (choice,) = report.choices
    return choice.packs


def measure(case: Case, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one set of records."""
    size: dict[str, Any] = {"pack_size": case.pack_size}
    whole = packstore.pack(
        case.read(),
        str(folder / "concat"),
        args.tokenizer,
        layout="concat",
        **size,
        **case.settings,
    )
    datasets = {"concat": whole}
    for share in ("example", "pack"):
        datasets[share] = packstore.pack(
            whole,
            str(folder / share),
            layout="shared_prefix",
            share_prefixes=share,
            **size,
        )
    others = {
        other_size: packstore.pack(
            whole,
            str(folder / f"{other_size}"),
            pack_size=other_size,
            share_prefixes="pack",
        )
        for other_size in case.other_pack_sizes
    }
    examples = Examples.concat([unpack(packs) for packs in whole.iter_packs()])
    one_level_sizes = example_sizes(examples, one_level(examples)[0])
    one_level_plan = packstore.plan(one_level_sizes, **size)

    step = None
    if case.is_timed:
        kind = whole.manifest.kind
        step = measure_steps(datasets["pack"], kind, args.step_tokens, args.rounds)

    manifest = whole.manifest
    tokens = {way: dataset.manifest.totals.tokens for way, dataset in datasets.items()}
    packs = {way: len(dataset) for way, dataset in datasets.items()}
    tokens["one_level"] = int(one_level_sizes.sum())
    packs["one_level"] = one_level_plan.num_packs
    return {
        "commit": provenance()["commit"],
        **size,
        "kind": manifest.kind,
        "examples": manifest.totals.examples,
        "sequences": manifest.totals.sequences,
        "supervised_tokens": manifest.totals.supervised_tokens,
        "dropped": dict(manifest.records.dropped),
        "tokens": {way: tokens[way] for way in WAYS},
        "of_concat": {way: tokens[way] / tokens["concat"] for way in WAYS},
        "packs": {way: packs[way] for way in WAYS},
        "estimated_packs": {
            share: estimated_packs(whole, case.pack_size, share)
            for share in ("example", "pack")
        },
        "other_pack_sizes": {
            other_size: dataset.manifest.totals.tokens
            for other_size, dataset in others.items()
        },
        "most_keys": datasets["pack"].manifest.statistics.most_keys,
        "step": step,
    }


_PROMPT: dict[str, Any] = {
    "tasks": 64,
    "system": 100,
    "tools": 2,
    "tool": 50,
    "question": 100,
}

ONE_ANSWER = Sizes(**_PROMPT, turns=1, forks=(0,) * 7, answer=800)
"""512 rollouts of about 1,100 tokens, eight answers to each prompt of about 300."""

FORKED = Sizes(**_PROMPT, turns=4, forks=(0, 0, 0, 0, 0, 1, 2), answer=100, result=100)
"""512 rollouts of the same size, of four turns; two of eight fork later."""


def measure_planning(rounds: int) -> dict[str, Any]:
    """Return CPU milliseconds in which `pack_in_memory` packs 512 records."""
    forked = draw_rollouts(FORKED)
    sets: dict[str, list[Any]] = {
        "answers": list(answer_ids(draw_rollouts(ONE_ANSWER))),
        "turns": list(itertools.islice(turn_ids(forked), 512)),
        "trajectories": list(trajectory_ids(forked)),
    }
    result: dict[str, Any] = {"pack_size": 16_384}
    for name, rows in sets.items():
        for form, convert in (("lists", list), ("arrays", np.array)):
            converted = [converted_ids(row, convert) for row in rows]
            milliseconds = []
            for _ in range(rounds + 1):  # the first loads libraries
                started = time.process_time()
                batches = pt.pack_in_memory(
                    converted, 16_384, "shared_prefix", rank=0, world_size=1
                )
                milliseconds.append(1e3 * (time.process_time() - started))
            result[f"{name}, {form}"] = {
                "sequences": sum(len(batch.lengths) for batch in batches),
                "keys": int(sum(batch.lengths.sum() for batch in batches)),
                "tokens": sum(batch.num_tokens for batch in batches),
                "median_ms": round(statistics.median(milliseconds[1:]), 1),
            }
    return result


def converted_ids(row: Any, convert: Callable[[list[int]], Any]) -> Any:
    """Return a record of token ids, each list of them converted."""
    if isinstance(row, tuple):
        prompt, responses, rewards = row
        return convert(prompt), [convert(response) for response in responses], rewards
    labels = [convert(label) for label in row["response_labels"]]
    responses = [convert(response) for response in row["responses"]]
    return row | {
        "prompt": convert(row["prompt"]),
        "responses": responses,
        "response_labels": labels,
    }


def write(path: Path, view: str, sizes: Sizes) -> None:
    """Write generated rollouts as JSON lines of chats."""
    views = {"turns": turn_chats, "trajectories": trajectory_chats}
    with path.open("w", encoding="utf-8") as file:
        for record in views[view](draw_rollouts(sizes)):
            file.write(json.dumps(record) + "\n")


def main() -> None:
    """Write rollouts, or measure, print and save."""
    command = parser(__doc__)
    command.add_argument(
        "--write", type=Path, help="write rollouts here, measure nothing"
    )
    command.add_argument("--view", choices=("turns", "trajectories"), default="turns")
    command.add_argument("--tasks", type=int, default=Sizes.tasks)
    command.add_argument("--data", type=Path, help="folder of real data")
    command.add_argument("--tokenizer", help="folder or file of the tokenizer")
    command.add_argument(
        "--cases",
        nargs="+",
        help="sets to measure (default: all); others keep their figures",
    )
    command.add_argument(
        "--time-all",
        action="store_true",
        help="also steps of long rollouts: half an hour",
    )
    command.add_argument(
        "--keep-steps",
        action="store_true",
        help="time no steps, keep the earlier times of the sets",
    )
    command.add_argument("--step-tokens", type=int, default=16_384)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--out", default=RESULTS / "agents.json", help="-: nowhere")
    command.add_argument(
        "--quick",
        action="store_true",
        help="short rollouts, one round, nothing written",
    )
    args = command.parse_args()
    sizes = Sizes(tasks=args.tasks)
    if args.quick:
        sizes = replace(SHORT, tasks=2)
        args.step_tokens, args.rounds, args.out = 2048, 1, "-"
    if args.write:
        write(args.write, args.view, sizes)
        return

    torch.set_num_threads(1)
    cases = real_cases(args.data) if args.data else {}
    cases |= generated_cases(sizes, args.time_all)
    earlier = earlier_rows(args.out)
    rows = dict(earlier) if args.cases else {}
    for name in args.cases or cases:
        case = cases[name]
        if args.keep_steps:
            case = replace(case, is_timed=False)
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = measure(case, Path(folder), args)
        if args.keep_steps:
            rows[name]["step"] = earlier[name]["step"]
        print(name, json.dumps(rows[name]))
    show_rows(rows)
    result = {
        "environment": provenance("numpy", "torch", "transformers"),
        "tokenizer": Path(args.tokenizer).name,
        "seed": SEED,
        "sizes": asdict(sizes),
        "sets": rows,
        "planning": measure_planning(args.rounds),
    }
    print(json.dumps(result["planning"], indent=1))
    save(args.out, result)


def earlier_rows(path: Path | str) -> dict[str, Any]:
    """Return the sets of an earlier result; none if there is no such file."""
    if not Path(path).exists():
        return {}
    return json.loads(Path(path).read_text(encoding="utf-8"))["sets"]


def show_rows(rows: dict[str, Any]) -> None:
    """Print tokens, packs and times of the sets, over those of `concat`."""
    columns = [
        "",
        "tokens of concat",
        *WAYS[1:],
        *(f"{way}, faster" for way in WAYS[1:]),
    ]
    table = []
    for name, row in rows.items():
        shares = [row["of_concat"][way] for way in WAYS[1:]]
        speeds = ["-"] * len(WAYS[1:])
        if row["step"]:
            speeds = [row["step"]["times_faster"][way] for way in WAYS[1:]]
        table.append([name, row["tokens"]["concat"], *shares, *speeds])
    show(
        columns,
        table,
        "tokens over those of concat, and how many times as fast a step is",
    )


if __name__ == "__main__":
    main()
