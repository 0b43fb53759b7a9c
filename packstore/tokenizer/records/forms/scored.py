"""Answers with a score each: several to a question, or a single one that is judged."""

from __future__ import annotations

from packstore.tokenizer.records.forms import Fields, form
from packstore.tokenizer.records.forms.helpers import (
    after_rounds,
    first_present,
    join_texts,
    split_at_first_answer,
    split_rounds,
    to_number,
    to_score,
)
from packstore.tokenizer.records.forms.verdicts import HELPSTEER2_TURN
from packstore.tokenizer.records.reading import Answers, Chat
from packstore.tokenizer.records.types import (
    anything,
    chat,
    dialogues,
    number,
    numbers,
    numeral,
    rounds,
    score,
    text,
    texts,
    turns,
)
from packstore.tokenizer.refusals import wrong_type

# Several answers


@form(
    "scored",
    {
        "instruction": text,
        "completions[].response": texts,
        "completions[].overall_score": numbers,
    },
    leaves=(
        "source",
        "models",
        "correct_answers",
        "incorrect_answers",
        "completions[].annotations*",
        "completions[].critique",
        "completions[].fine-grained_score",
        "completions[].custom_system_prompt",
        "completions[].principle",
    ),
    as_chat=True,
    sets=("openbmb/UltraFeedback",),
    source="https://huggingface.co/datasets/openbmb/UltraFeedback",
)
@form(
    "scored",
    {"question": text, "answers[].text": texts, "answers[].pm_score": numbers},
    leaves=("qid", "date", "metadata", "answers[].author*", "answers[].selected"),
    as_chat=True,
    sets=("HuggingFaceH4/stack-exchange-preferences",),
    source="https://huggingface.co/datasets/HuggingFaceH4/stack-exchange-preferences",
)
@form(
    "scored",
    {
        "question": text,
        "inferences[].completion": texts,
        "inferences[].pass_rate": numbers,
    },
    leaves=("id", "source", "test_cases", "context_messages"),
    as_chat=True,
    sets=("TIGER-Lab/AceCode-87K",),
    source="https://github.com/allenai/open-instruct",
)
@form(
    "scored",
    {"instruction": text, "generations": texts, "ratings": numbers},
    leaves=(
        "rationales",
        "rationales-for-ratings",
        "types",
        "model_name",
        "model_names",
        "generation_models",
        "distilabel_metadata",
    ),
    as_chat=True,
    source="https://github.com/argilla-io/distilabel/blob/main/src/distilabel/steps/tasks/ultrafeedback.py",
)
@form(
    "scored",
    {"instruction": text, "responses": texts, "scores": numbers},
    leaves=("model_name", "distilabel_metadata"),
    as_chat=True,
    source="https://github.com/argilla-io/distilabel/blob/main/src/distilabel/steps/tasks/quality_scorer.py",
)
@form(
    "scored",
    {"prompt": text, "all_generated_responses": texts, "all_rm_scores": numbers},
    without=("chosen", "rejected"),
    as_chat=True,
    source="https://github.com/princeton-nlp/SimPO/blob/main/on_policy_data_gen/reward_model_annotate.py",
)
@form(
    "scored",
    {"prompt": turns, "responses": dialogues, "rewards": numbers},
    without=("scores",),
    source="https://github.com/RLHFlow/Online-RLHF/blob/main/annotate_data/get_rewards.py",
)
@form(
    "scored",
    {"prompt": turns, "completions": dialogues, "rewards": numbers},
    leaves=("step",),
    source="https://github.com/whitecircle/halo/blob/main/agent-docs/data/dataset-formats.md",
)
def scored_answers(fields: Fields) -> Answers:
    """A question and any number of answers, with a score, a rating or a reward for
    each.
    """
    scores = first_present(
        fields,
        "completions[].overall_score",
        "answers[].pm_score",
        "inferences[].pass_rate",
        "ratings",
        "scores",
        "all_rm_scores",
        "rewards",
    )
    return Answers(
        first_present(fields, "instruction", "question", "prompt"),
        first_present(
            fields,
            "completions[].response",
            "answers[].text",
            "inferences[].completion",
            "generations",
            "responses",
            "all_generated_responses",
            "completions",
        ),
        [to_number(value) for value in scores],
    )


@form(
    "scored",
    {"prompt": text, "answers[].answer": texts, "answers[].rank": numbers},
    leaves=("turns", "num_responses", "source", "good_natured", "answers[].model"),
    as_chat=True,
    sets=("berkeley-nest/Nectar",),
    source="https://github.com/allenai/open-instruct/blob/main/scripts/data/preferences/nectar.py",
)
@form(
    "scored",
    {
        "context": turns,
        "completions[].rank": numbers,
        "completions[].completion": dialogues,
    },
    leaves=("task_name",),
    source="https://github.com/NVIDIA-NeMo/RL/blob/main/docs/guides/dpo.md",
)
def ranked_answers(fields: Fields) -> Answers:
    """A question and any number of answers with a rank each; the lowest rank is the
    best.
    """
    ranks = first_present(fields, "answers[].rank", "completions[].rank")
    return Answers(
        first_present(fields, "prompt", "context"),
        first_present(fields, "answers[].answer", "completions[].completion"),
        [-to_number(rank) for rank in ranks],
    )


@form(
    "scored",
    {
        "prompt": text,
        "chosen": texts,
        "rejected": texts,
        "num_correct": number,
        "num_rejected": number,
    },
    leaves=("total_completions", "models", "subset", "additional_metadata"),
    as_chat=True,
    sets=("allenai/reward-bench-2",),
    source="https://github.com/allenai/reward-bench/blob/main/rewardbench/utils.py",
)
def reward_bench_2(fields: Fields) -> Answers:
    """A question with lists of right and of wrong answers, which get the scores 1 and
    0.
    """
    chosen = fields["chosen"]
    rejected = fields["rejected"]
    for text_of_both in set(chosen).intersection(rejected):
        raise wrong_type("an answer must not be chosen and rejected", text_of_both)
    scores = [1] * len(chosen) + [0] * len(rejected)
    return Answers(fields["prompt"], [*chosen, *rejected], scores)


# One answer


@form(
    "scored",
    {"prompt": text, "response": text, "is_safe": score},
    leaves=(
        "category",
        "prompt_source",
        "response_source",
        "harm_category",
        "severity_level",
    ),
    as_chat=True,
    sets=("PKU-Alignment/BeaverTails", "PKU-Alignment/PKU-SafeRLHF-QA"),
    source="https://huggingface.co/datasets/PKU-Alignment/BeaverTails",
)
@form(
    "scored",
    {"question": text, "generated_solution": text, "is_correct": score},
    leaves=("predicted_answer", "error_message", "generation_type"),
    as_chat=True,
    sets=("nvidia/OpenMathInstruct-1",),
    source="https://huggingface.co/datasets/nvidia/OpenMathInstruct-1/blob/main/README.md",
)
@form(
    "scored",
    {"question": text, "answer": text, "truth": score},
    as_chat=True,
    source="https://github.com/modelscope/data-juicer/blob/main/demos/data/auto-prompt-optim/init_infer_dataset.jsonl",
)
@form(
    "scored",
    {"orig_instruction": text, "orig_response": text, "orig_score": numeral},
    leaves=(
        "orig_reference_answer",
        "orig_criteria",
        "orig_feedback",
        "orig_score?_description",
        "instruction",
        "input",
        "output",
    ),
    as_chat=True,
    sets=("prometheus-eval/Feedback-Collection",),
    source="https://github.com/prometheus-eval/prometheus-eval/blob/main/docs/prompts.md",
)
@form(
    "scored",
    {"prompt": text, "completion": text, "label": score, "average_rating": number},
    leaves=("annotations",),
    as_chat=True,
    sets=("argilla/ultrafeedback-binarized-preferences-cleaned-kto",),
    source="https://huggingface.co/datasets/argilla/ultrafeedback-binarized-preferences-cleaned-kto",
)
@form(
    "scored",
    {"system": text, "prompt": text, "completion": text, "label": score},
    leaves=("rating", "status", "in_gsm8k_train"),
    as_chat=True,
    sets=("argilla/distilabel-intel-orca-kto",),
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/rlhf.qmd",
)
@form(
    "scored",
    {"question": text, "completion": text, "label": score},
    as_chat=True,
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/rlhf.qmd",
)
@form(
    "scored",
    {"instruction": text, "completion": text, "label": score},
    as_chat=True,
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/rlhf.qmd",
)
@form(
    "scored",
    {"prompt": text, "response": text, "preference": score},
    leaves=("sample_id",),
    source="https://github.com/NVIDIA/NeMo-Aligner/blob/main/nemo_aligner/data/nlp/datasets.py",
)
@form(
    "scored",
    {"step": number, "prompt": text, "completion": text, "advantage": number},
    leaves=("*reward*", "*_func", "reference_*"),
    source="https://github.com/huggingface/trl/blob/main/trl/templates/completions_dataset_card.md",
)
@form(
    "scored",
    {"input": text, "output": text, "reward": score},
    without=("instruction", "chosen", "messages"),
    source="https://github.com/OpenRLHF/OpenRLHF/blob/0551ff62af4a5842116759fd9675b23ecabf0da5/openrlhf/cli/batch_inference.py",
)
def judged_answer(fields: Fields) -> Answers:
    """A question, one answer, and its label, score, reward or advantage."""
    judgement = first_present(
        fields,
        "is_safe",
        "is_correct",
        "truth",
        "orig_score",
        "label",
        "preference",
        "advantage",
        "reward",
    )
    response = first_present(
        fields,
        "response",
        "generated_solution",
        "answer",
        "orig_response",
        "completion",
        "output",
    )
    return Answers(
        first_present(
            fields, "prompt", "question", "orig_instruction", "instruction", "input"
        ),
        [response],
        [to_score(judgement)],
    )


@form(
    "scored",
    {"instruction": text, "output": text, "kto_tag": score},
    optional={"input": text, "history": rounds},
    as_chat=True,
    source="https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md",
)
def alpaca_feedback(fields: Fields) -> Answers:
    """An instruction with its input, one output and its kto_tag, and earlier rounds as
    history.
    """
    prompt = join_texts(fields["instruction"], fields.get("input"))
    return Answers(
        after_rounds(fields.get("history"), prompt),
        [fields["output"]],
        [to_score(fields["kto_tag"])],
    )


@form(
    "scored",
    {"prompt": text, "response": text, "helpfulness": number},
    leaves=("correctness", "coherence", "complexity", "verbosity"),
    as_chat=True,
    sets=("nvidia/HelpSteer2", "nvidia/HelpSteer"),
    source="https://huggingface.co/datasets/nvidia/HelpSteer2",
)
def helpsteer2(fields: Fields) -> Answers:
    """One answer and its helpfulness from 0 to 4; a prompt may hold earlier rounds."""
    prompt = split_rounds(fields["prompt"], HELPSTEER2_TURN)
    return Answers(prompt, [fields["response"]], [fields["helpfulness"]])


@form(
    "scored",
    {"info": anything, "summary.text": text, "summary.axes.overall": number},
    optional={"info.title": anything, "info.post": anything, "info.article": anything},
    leaves=("worker", "batch", "split", "info.*", "summary.*"),
    as_chat=True,
    sets=("openai/summarize_from_feedback",),
    source="https://github.com/LAION-AI/Open-Assistant/blob/main/model/model_training/custom_datasets/rank_datasets.py",
)
def summarize_from_feedback_axes(fields: Fields) -> Answers:
    """A post or an article, one summary and its overall score."""
    prompt = join_texts(
        fields.get("info.title"),
        fields.get("info.post"),
        fields.get("info.article"),
    )
    return Answers(prompt, [fields["summary.text"]], [fields["summary.axes.overall"]])


@form(
    "scored",
    {"prompt": text, "completion": chat, "label": score, "rating": number},
    leaves=("dataset",),
    sets=("argilla/kto-mix-15k", "argilla/distilabel-capybara-kto-15k-binarized"),
    source="https://huggingface.co/datasets/argilla/kto-mix-15k",
)
def kto_mix(fields: Fields) -> Answers:
    """A whole dialogue as the completion, and its label; the prompt is its last
    question again.
    """
    return Answers(None, [fields["completion"]], [to_score(fields["label"])])


@form(
    "scored",
    {"task_id": number, "traj": chat, "reward": number},
    leaves=("trial", "info"),
    turns={"function_call": None},
    source="https://github.com/sierra-research/tau-bench/blob/main/tau_bench/types.py",
)
@form(
    "sft",
    {"task_id": number, "traj": chat},
    without=("reward",),
    leaves=("trial", "info.task"),  # `info.reward_info` judges the dialogue, too
    turns={"function_call": None},
    source="https://github.com/sierra-research/tau-bench/blob/main/tau_bench/types.py",
)
def tau_bench(fields: Fields) -> Answers | Chat:
    """A dialogue of an agent with a user and tools, and its reward, unless that is
    ignored; all its answers are learned.
    """
    if "reward" not in fields:
        return Chat(messages=fields["traj"])
    prompt, response = split_at_first_answer(fields["traj"])
    return Answers(prompt, [response], [fields["reward"]])
