"""Two answers, and the verdict, the votes or the scores that make one the better.

The arguments of ``@form`` are those of :class:`Structure`: `leaves` names the fields
that are ignored on purpose, and `as_chat` turns plain texts into user and assistant
turns; dialogues have turns already.

Types of fields
    `chat` is a list of messages with roles; `messages` need none; `turns` are messages
    or text, and `dialogues` a list of such turns. `numeral` is a number or its text;
    `numbers` and `labels` are lists of numbers.

Steps that make a pair of two answers
    ``by_sign`` takes a preference that is negative if the first answer is better,
    ``by_word`` a verdict that is one of the listed values, ``by_votes`` a list of them,
    ``by_score`` a score for each answer, and ``by_scores`` a list of answers and a list
    of their scores.
"""

from __future__ import annotations

import json
from typing import Any

from packstore.tokenizer.dialogue.messages import normalize_messages
from packstore.tokenizer.records.forms import Fields, form
from packstore.tokenizer.records.forms.helpers import (
    Message,
    by_score,
    by_scores,
    by_sign,
    by_votes,
    by_word,
    cut_at,
    first_present,
    join_texts,
    questions_and_answers,
    refuse,
    split_rounds,
    to_number,
)
from packstore.tokenizer.records.reading import Drop, Pair
from packstore.tokenizer.records.types import (
    anything,
    chat,
    dialogues,
    labels,
    messages,
    number,
    numbers,
    numeral,
    text,
    texts,
    turns,
)
from packstore.tokenizer.refusals import wrong_type

HELPSTEER2_TURN = "\n<extra_id_1>(?:Assistant|User)\n"
"""Pattern of the text between the turns of a prompt of HelpSteer2."""

ARENA_TIES = ("tie", "tie (bothbad)", "both_bad")


# Preferences on a scale


@form(
    "preference",
    {
        "context": turns,
        "response1": text,
        "response2": text,
        "overall_preference": number,
    },
    leaves=("domain", "language", "individual_preference"),
    as_chat=True,
    sets=("nvidia/HelpSteer3",),
    source="https://huggingface.co/datasets/nvidia/HelpSteer3",
)
@form(
    "preference",
    {
        "context": turns,
        "response1": text,
        "response2": text,
        "individual_preference": anything,
    },
    without=("overall_preference",),
    leaves=("domain", "language"),
    as_chat=True,
    sets=("nvidia/HelpSteer3",),
    source="https://huggingface.co/datasets/nvidia/HelpSteer3",
)
def helpsteer3(fields: Fields) -> Pair | Drop:
    """Two answers and a preference from -3 (the first) to 3 (the second)."""
    if "overall_preference" not in fields:
        # Without a preference neither answer is better: it is counted as a tie.
        return Drop("tie", "overall_preference is null")
    return by_sign(
        fields["context"],
        fields["response1"],
        fields["response2"],
        fields["overall_preference"],
    )


@form(
    "preference",
    {
        "prompt": text,
        "response_1": text,
        "response_2": text,
        "preference_strength": number,
    },
    leaves=(
        "split",
        "preference_statement",
        "preference_elaboration",
        "three_most_similar_preferences",
        "all_preferences_unprocessed",
    ),
    as_chat=True,
    sets=("nvidia/HelpSteer2",),
    source="https://huggingface.co/datasets/nvidia/HelpSteer2",
)
def helpsteer2_preference(fields: Fields) -> Pair | Drop:
    """Two answers and a preference from -3 (the first) to 3; a prompt may hold earlier
    rounds.
    """
    return by_sign(
        split_rounds(fields["prompt"], HELPSTEER2_TURN),
        fields["response_1"],
        fields["response_2"],
        fields["preference_strength"],
    )


@form(
    "preference",
    {"instruction": text, "output_1": text, "output_2": text, "preference": number},
    optional={"input": text},
    leaves=(
        "annotator",
        "dataset",
        "datasplit",
        "generator_1",
        "generator_2",
        "price_per_example",
        "raw_completion",
        "raw_preference",
        "time_per_example",
    ),
    as_chat=True,
    sets=("tatsu-lab/alpaca_farm",),
    source="https://huggingface.co/datasets/tatsu-lab/alpaca_farm",
)
@form(
    "preference",
    {"instruction": text, "output_1": text, "output_2": text, "annotator": text},
    without=("preference",),
    leaves=("dataset", "generator_1", "generator_2", "raw_completion"),
    as_chat=True,
    source="https://github.com/tatsu-lab/alpaca_eval/blob/main/src/alpaca_eval/annotators/pairwise_evaluator.py",
)
def alpaca_eval(fields: Fields) -> Pair | Drop:
    """Two outputs and a preference: below 1.5 the first, above it the second; 1.5 and 0
    tie.

    AlpacaFarm and AlpacaEval 1 write 1, 2 or 0; AlpacaEval 2 a probability from 1 to 2,
    and null where the annotator gave no verdict.
    """
    preference = fields.get("preference")
    if preference is None:
        # Without a verdict neither output is better: it is counted as a tie.
        return Drop("tie", "preference is null")
    if preference in (0, 1.5):
        return Drop("tie", f"preference {preference}")
    if not 1 <= preference <= 2:
        raise wrong_type("preference must be 0, or from 1 to 2", preference)

    prompt = join_texts(fields["instruction"], fields.get("input"))
    if preference < 1.5:
        return Pair(prompt, fields["output_1"], fields["output_2"])
    return Pair(prompt, fields["output_2"], fields["output_1"])


# Verdicts that name a side


@form(
    "preference",
    {"instruction": text, "output_1": text, "output_2": text, "label": number},
    optional={"input": text},
    as_chat=True,
    sets=("NCSOFT/offsetbias",),
    source="https://huggingface.co/datasets/NCSOFT/offsetbias",
)
def offsetbias(fields: Fields) -> Pair | Drop:
    """Two outputs, and a label that is the number of the better one, 1 or 2."""
    return by_word(
        join_texts(fields["instruction"], fields.get("input")),
        fields["output_1"],
        fields["output_2"],
        fields["label"],
        first_is=(1,),
        second_is=(2,),
    )


@form(
    "preference",
    {
        "prompt": text,
        "response_0": text,
        "response_1": text,
        "better_response_id": number,
    },
    leaves=(
        "prompt_source",
        "response_?_source",
        "response_?_sha256",
        "is_response_?_safe",
        "response_?_harm_category",
        "response_?_severity_level",
    ),
    as_chat=True,
    sets=(
        "PKU-Alignment/PKU-SafeRLHF",
        "PKU-Alignment/PKU-SafeRLHF-30K",
        "PKU-Alignment/PKU-SafeRLHF-10K",
        "PKU-Alignment/PKU-SafeRLHF-single-dimension",
    ),
    source="https://github.com/ContextualAI/HALOs/blob/main/train/data.py",
)
def pku_saferlhf(fields: Fields) -> Pair | Drop:
    """Two answers and better_response_id, 0 or 1; safer_response_id is not read.

    It is a verdict on safety alone, and may name the other answer.
    """
    return by_word(
        fields["prompt"],
        fields["response_0"],
        fields["response_1"],
        fields["better_response_id"],
        first_is=(0,),
        second_is=(1,),
    )


@form(
    "preference",
    {"history": text, "human_ref_A": text, "human_ref_B": text, "labels": number},
    leaves=(
        "post_id",
        "domain",
        "upvote_ratio",
        "c_root_id_?",
        "created_at_utc_?",
        "score_?",
        "seconds_difference",
        "score_ratio",
    ),
    as_chat=True,
    sets=("stanfordnlp/SHP", "stanfordnlp/SHP-2"),
    source="https://github.com/ContextualAI/HALOs/blob/main/train/data.py",
)
def shp(fields: Fields) -> Pair | Drop:
    """A post and two comments: with labels 1 the first is better, with 0 the second."""
    return by_word(
        fields["history"],
        fields["human_ref_A"],
        fields["human_ref_B"],
        fields["labels"],
        first_is=(1,),
        second_is=(0,),
    )


@form(
    "preference",
    {
        "orig_instruction": text,
        "orig_response_A": text,
        "orig_response_B": text,
        "orig_preference": text,
    },
    leaves=(
        "orig_reference_answer",
        "orig_criteria",
        "orig_feedback*",
        "orig_score_?",
        "instruction",
        "input",
        "output",
    ),
    as_chat=True,
    sets=("prometheus-eval/Preference-Collection", "prometheus-eval/Preference-Bench"),
    source="https://huggingface.co/datasets/prometheus-eval/Preference-Collection",
)
def prometheus_preference(fields: Fields) -> Pair | Drop:
    """Two answers and a verdict, A or B; the instruction for a judge and its output are
    left.

    The output repeats the verdict, and the instruction repeats both answers.
    """
    return by_word(
        fields["orig_instruction"],
        fields["orig_response_A"],
        fields["orig_response_B"],
        fields["orig_preference"],
        first_is=("A",),
        second_is=("B",),
    )


@form(
    "preference",
    {"question": text, "response_A": text, "response_B": text, "label": text},
    leaves=("pair_id", "original_id", "source", "response_model"),
    as_chat=True,
    sets=("ScalerLab/JudgeBench",),
    source="https://github.com/ScalerLab/JudgeBench",
)
def judgebench(fields: Fields) -> Pair | Drop:
    """Two answers and a label, A>B or B>A."""
    return by_word(
        fields["question"],
        fields["response_A"],
        fields["response_B"],
        fields["label"],
        first_is=("A>B",),
        second_is=("B>A",),
    )


@form(
    "preference",
    {
        "info": anything,  # required; each of its parts may be null
        "summaries[].text": texts,
        "choice": number,
    },
    optional={"info.title": anything, "info.post": anything, "info.article": anything},
    leaves=("worker", "batch", "split", "extra", "info.*", "summaries[].*"),
    as_chat=True,
    sets=("openai/summarize_from_feedback",),
    source="https://github.com/huggingface/trl/blob/main/examples/datasets/tldr_preference.py",
)
def summarize_from_feedback(fields: Fields) -> Pair | Drop:
    """A post or an article and two summaries; choice is the number of the better one, 0
    or 1.
    """
    summaries = fields["summaries[].text"]
    if len(summaries) != 2:
        raise wrong_type("there must be two summaries", summaries)
    prompt = join_texts(
        fields.get("info.title"),
        fields.get("info.post"),
        fields.get("info.article"),
    )
    return by_word(
        prompt,
        summaries[0],
        summaries[1],
        fields["choice"],
        first_is=(0,),
        second_is=(1,),
    )


# Arenas


@form(
    "preference",
    {"conversation_a": chat, "conversation_b": chat, "winner": text},
    optional={
        "turn": number,
        "full_conversation": anything,
        "evaluation_order": numeral,
    },
    leaves=(
        "question_id",
        "model_a",
        "model_b",
        "judge",
        "judge_hash",
        "anony",
        "tstamp",
        "openai_moderation",
        "toxic_chat_tag",
        "language",
        "evaluation_session_id",
        "conv_metadata",
        "category_tag",
        "is_code",
        "is_refusal",
        "dedup_tag",
        "occupational_tags",
    ),
    turns={"num_tokens": None},  # a key of messages that is ignored
    sets=(
        "lmsys/chatbot_arena_conversations",
        "lmsys/mt_bench_human_judgments",
        "lmarena-ai/arena-human-preference-100k",
        "lmarena-ai/arena-human-preference-140k",
        "lmarena-ai/arena-expert-5k",
    ),
    source="https://huggingface.co/datasets/lmarena-ai/arena-human-preference-140k",
)
@form(
    "preference",
    {"messages_a": chat, "messages_b": chat, "winner": text},
    leaves=(
        "model_a",
        "model_b",
        "judge",
        "turn",  # here the number of rounds, all of which are judged
        "system_?_metadata",
        "conv_metadata",
        "languages",
        "primary_intent",
        "secondary_intent",
    ),
    sets=("lmarena-ai/search-arena-24k",),
    source="https://huggingface.co/datasets/lmarena-ai/search-arena-24k",
)
def chatbot_arena(fields: Fields) -> Pair | Drop:
    """Two dialogues and the winner: model_a, model_b or a tie; turn is the round that
    is judged.

    A session may have several votes. From the second on, full_conversation holds the
    rounds before the judged ones. Other models answered them, mostly with different
    texts on each side: such a vote is refused, as ``different_contexts``.
    """
    first = first_present(fields, "conversation_a", "messages_a")
    second = first_present(fields, "conversation_b", "messages_b")
    if "turn" in fields:
        first = cut_at(first, answer_number=fields["turn"])
        second = cut_at(second, answer_number=fields["turn"])

    vote_number = to_number(fields.get("evaluation_order", 1))
    rounds = fields.get("full_conversation") or []
    before_first = _rounds_before(first, rounds, "model_side_a")
    before_second = _rounds_before(second, rounds, "model_side_b")
    if vote_number > 1 and not before_first and not before_second:
        raise refuse(
            "missing_field", f"vote {vote_number:g} without the rounds before it"
        )
    if before_first != before_second:
        raise refuse(
            "different_contexts", "rounds before the judged ones, with other answers"
        )

    return by_word(
        None,
        [*before_first, *first],
        [*before_second, *second],
        fields["winner"],
        first_is=("model_a",),
        second_is=("model_b",),
        tie_is=ARENA_TIES,
    )


def _rounds_before(
    judged: list[Message], rounds: Any, answer_key: str
) -> list[Message]:
    """Return the messages of one side before the judged ones.

    Args:
        judged: the messages that are judged.
        rounds: the rounds of the session, with the judged ones at their end or without
            them.
        answer_key: key of this side's answer in a round.
    """
    if not rounds:
        return []
    try:
        turns_of_side = [item[key] for item in rounds for key in ("user", answer_key)]
    except (KeyError, TypeError):
        raise wrong_type(
            f"rounds must be a list of user and {answer_key}", rounds
        ) from None
    session = normalize_messages(turns_of_side, unknown=set())
    judged_end = normalize_messages(judged, unknown=set())

    ends_with_judged = session[-len(judged_end) :] == judged_end
    if ends_with_judged:
        return session[: -len(judged_end)]

    has_part_of_judged = judged_end[0] in session
    if has_part_of_judged:
        raise wrong_type(
            "earlier rounds must end with the judged ones", turns_of_side[-1]
        )
    return session  # without the judged rounds


@form(
    "preference",
    {"prompt": text, "response_1": text, "response_2": text, "winner": text},
    leaves=(
        "question_id",
        "model_a",
        "model_b",
        "language",
        "*_prompt",
        "is_code",
        "is_refusal",
    ),
    as_chat=True,
    sets=("lmarena-ai/PPE-Human-Preference-V1",),
    source="https://huggingface.co/datasets/lmarena-ai/PPE-Human-Preference-V1",
)
def ppe_human_preference(fields: Fields) -> Pair | Drop:
    """Two answers and the winner: model_a, model_b or a tie."""
    return by_word(
        fields["prompt"],
        fields["response_1"],
        fields["response_2"],
        fields["winner"],
        first_is=("model_a",),
        second_is=("model_b",),
        tie_is=ARENA_TIES,
    )


@form(
    "preference",
    {
        "prompt": text,
        "response_a": text,
        "response_b": text,
        "winner_model_a": numeral,
        "winner_model_b": numeral,
    },
    leaves=("id", "model_a", "model_b", "winner_tie"),
    as_chat=True,
    sets=("lmarena-ai/arena-human-preference-55k",),
    source="https://github.com/lm-sys/RouteLLM/blob/main/routellm/routers/similarity_weighted/utils.py",
)
def arena_55k(fields: Fields) -> Pair | Drop:
    """Questions and two lists of answers as JSON text, or plain text; 1 stands under
    the winner.

    The other answer's column holds 0; at a tie both do.
    """
    prompt = fields["prompt"]
    first = fields["response_a"]
    second = fields["response_b"]
    has_lists = [_holds_json_list(value) for value in (prompt, first, second)]
    if any(has_lists) and not all(has_lists):
        rule = "questions and answers must all be lists of texts, or all plain text"
        raise wrong_type(rule, [prompt, first, second])
    if all(has_lists):
        first = questions_and_answers(prompt, first)
        second = questions_and_answers(prompt, second)
        prompt = None
    return by_score(
        prompt, first, second, fields["winner_model_a"], fields["winner_model_b"]
    )


def _holds_json_list(value: str) -> bool:
    """Return True for the JSON text of a list of texts and nulls."""
    if not value.startswith("["):
        return False
    try:
        items = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return bool(items) and all(item is None or isinstance(item, str) for item in items)


# Votes and scores


@form(
    "preference",
    {
        "instruction": text,
        "response1": text,
        "response2": text,
        "annotator1": number,
        "annotator2": number,
        "annotator3": number,
    },
    optional={"input": text},
    leaves=("idx", "motivation_app", "cmp_key"),
    as_chat=True,
    source="https://github.com/WeOpenML/PandaLM/blob/main/data/testset-v1.json",
)
def pandalm(fields: Fields) -> Pair | Drop:
    """Two answers and the votes of three annotators: 1, 2 or 0 for a tie."""
    votes = [fields["annotator1"], fields["annotator2"], fields["annotator3"]]
    # Other votes, such as 0, count for neither answer.
    return by_votes(
        join_texts(fields["instruction"], fields.get("input")),
        fields["response1"],
        fields["response2"],
        votes,
        first_is=(1,),
        second_is=(2,),
    )


@form(
    "preference",
    {
        "question.full_text": text,
        "answer_0": text,
        "answer_1": text,
        "score_0": number,
        "score_1": number,
    },
    leaves=("quotes_?", "tokens_?", "question.*"),
    as_chat=True,
    sets=("openai/webgpt_comparisons",),
    source="https://github.com/allenai/open-instruct/blob/main/scripts/data/preferences/webgpt.py",
)
@form(
    "preference",
    {"conv_A": chat, "conv_B": chat, "conv_A_rating": number, "conv_B_rating": number},
    leaves=("num_turns", "source"),
    sets=("llm-blender/Unified-Feedback",),
    source="https://github.com/YangRui2015/Generalizable-Reward-Model/blob/main/reward_models/load_datasets.py",
)
@form(
    "preference",
    {
        "instruction": text,
        "response": text,
        "response_base": text,
        "score": number,
        "score_base": number,
    },
    leaves=(
        "messages",
        "score_difference",
        "model_name_*",
        "intent",
        "knowledge",
        "difficulty",
        "explanation",
        "quality",
        "primary_tag",
        "other_tags",
        "embedding",
        "nn_indices",
        "nn_scores",
        "distilabel_metadata",
        "guard",
        "safe",
        "hazard_category",
    ),
    as_chat=True,
    sets=("argilla/magpie-ultra-v0.1",),
    source="https://huggingface.co/datasets/argilla/magpie-ultra-v0.1",
)
def scored_pair(fields: Fields) -> Pair | Drop:
    """Two answers or dialogues with a score each; the one with the higher score is
    chosen.
    """
    return by_score(
        first_present(fields, "question.full_text", "instruction"),
        first_present(fields, "answer_0", "conv_A", "response"),
        first_present(fields, "answer_1", "conv_B", "response_base"),
        first_present(fields, "score_0", "conv_A_rating", "score"),
        first_present(fields, "score_1", "conv_B_rating", "score_base"),
    )


@form(
    "preference",
    {
        "question_body": text,
        "answer1_body": text,
        "answer2_body": text,
        "score": numbers,
    },
    leaves=("question_id", "text", "answer?_metadata", "answer?_model_id", "reference"),
    as_chat=True,
    sets=("BAAI/JudgeLM-100K",),
    source="https://huggingface.co/datasets/BAAI/JudgeLM-100K",
)
def judgelm(fields: Fields) -> Pair | Drop:
    """Two answers and a list of their two scores."""
    return by_scores(
        fields["question_body"],
        [fields["answer1_body"], fields["answer2_body"]],
        fields["score"],
    )


@form(
    "preference",
    {"input": text, "targets.choices": texts, "targets.labels": labels},
    as_chat=True,
    sets=("HuggingFaceH4/hhh_alignment",),
    source="https://huggingface.co/datasets/HuggingFaceH4/hhh_alignment",
)
def hhh_alignment(fields: Fields) -> Pair | Drop:
    """A dialogue up to a question, and two choices with the labels 1 and 0."""
    return by_scores(
        split_rounds(fields["input"], "\n\n(?:Human|Assistant): ?"),
        fields["targets.choices"],
        fields["targets.labels"],
    )


@form(
    "preference",
    {
        "contents": messages,
        "completions[].completion": dialogues,
        "completions[].score": numbers,
    },
    optional={
        "systemInstruction.parts[].text": texts,
        "system_instruction.parts[].text": texts,
    },
    without=("tools",),  # refused as the form gemini_tools
    leaves=("systemInstruction.role", "system_instruction.role"),
    turns={"parts": "content"},
    source="https://docs.cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-preference-tuning-prepare",
)
def gemini_preference(fields: Fields) -> Pair | Drop:
    """A dialogue up to a question, and two completions with the scores 1 and 0."""
    instructions = first_present(
        fields,
        "systemInstruction.parts[].text",
        "system_instruction.parts[].text",
    )
    return by_scores(
        fields["contents"],
        fields["completions[].completion"],
        fields["completions[].score"],
        system=join_texts(*instructions) if instructions else None,
    )
