"""A better and a worse answer, each under a name of its own."""

from __future__ import annotations

from packstore.tokenizer.records.forms import Fields, form
from packstore.tokenizer.records.forms.helpers import (
    after_rounds,
    first_present,
    join_texts,
)
from packstore.tokenizer.records.reading import Drop, Pair
from packstore.tokenizer.records.types import (
    answer,
    anything,
    chat,
    messages,
    number,
    numbers,
    question,
    rounds,
    text,
    texts,
)

# Texts


@form(
    "preference",
    {"question": text, "chosen": text, "rejected": text},
    without=("prompt", "messages"),
    as_chat=True,
    sets=("Intel/orca_dpo_pairs",),
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/rlhf.qmd",
)
@form(
    "preference",
    {"system": text, "prompt": text, "chosen": text, "rejected": text},
    leaves=("category",),
    as_chat=True,
    sets=(
        "jondurbin/truthy-dpo-v0.1",
        "jondurbin/contextual-dpo-v0.1",
        "vicgalle/configurable-system-prompt-multitask",
    ),
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/rlhf.qmd",
)
@form(
    "preference",
    {"input": text, "chosen": text, "rejected": text},
    without=("prompt", "instruction", "question", "messages", "status"),
    as_chat=True,
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/rlhf.qmd",
)
@form(
    "preference",
    {"input": text, "accepted": text, "rejected": text},
    as_chat=True,
    sets=("Vezora/Code-Preference-Pairs",),
    source="https://github.com/huggingface/trl/blob/main/docs/source/dpo_trainer.md",
)
@form(
    "preference",
    {"question": text, "response_j": text, "response_k": text},
    leaves=("qid", "date", "metadata"),
    as_chat=True,
    sets=("lvwerra/stack-exchange-paired",),
    source="https://huggingface.co/datasets/lvwerra/stack-exchange-paired",
)
@form(
    "preference",
    {"question": text, "correction": text, "answer": text},
    as_chat=True,
    sets=("aligner/aligner-20K",),
    source="https://github.com/PKU-Alignment/align-anything/blob/main/align_anything/configs/format_dataset.py",
)
@form(
    "preference",
    {"question": text, "answer_zh": text, "answer_en": text},
    as_chat=True,
    sets=("shareAI/DPO-zh-en-emoji",),
    source="https://github.com/modelscope/ms-swift",
)
@form(
    "preference",
    {"prompt": text, "response": text, "chosen": text, "rejected": text},
    without=("system",),
    sets=("Dahoas/full-hh-rlhf", "Dahoas/rm-static"),
    source="https://github.com/volcengine/verl/blob/main/examples/data_preprocess/full_hh_rlhf.py",
)
def question_pairs(fields: Fields) -> Pair:
    """A question as text, a better and a worse answer; a response beside them is a
    copy.
    """
    return Pair(
        first_present(fields, "question", "prompt", "input"),
        first_present(
            fields, "chosen", "accepted", "response_j", "correction", "answer_zh"
        ),
        first_present(fields, "rejected", "response_k", "answer", "answer_en"),
    )


@form(
    "preference",
    {"instruction": text, "chosen": text, "rejected": text},
    optional={"input": text, "history": rounds},
    without=("prompt", "messages"),
    as_chat=True,
    sets=("llamafactory/ultrafeedback_binarized", "AstraMindAI/RLAIF-Nectar"),
    source="https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md",
)
@form(
    "preference",
    {"query": text, "response": text, "rejected_response": text},
    optional={"history": rounds},
    as_chat=True,
    source="https://github.com/modelscope/ms-swift/blob/main/swift/dataset/preprocessor/core.py",
)
def alpaca_pairs(fields: Fields) -> Pair:
    """An instruction with its input, a better and a worse answer, and earlier rounds as
    history.
    """
    prompt = join_texts(
        first_present(fields, "instruction", "query"), fields.get("input")
    )
    return Pair(
        after_rounds(fields.get("history"), prompt),
        first_present(fields, "chosen", "response"),
        first_present(fields, "rejected", "rejected_response"),
    )


@form(
    "preference",
    {"instruction": text, "chosen_response": text, "rejected_response": text},
    leaves=("metadata", "source", "chosen_model"),
    as_chat=True,
    sets=("argilla/distilabel-math-preference-dpo",),
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/rlhf.qmd",
)
@form(
    "preference",
    {
        "instruction": text,
        "chosen_response": text,
        "rejected_response": text,
        "chosen_avg_rating": number,
        "rejected_avg_rating": number,
    },
    leaves=("source", "chosen_model"),
    as_chat=True,
    sets=("argilla/ultrafeedback-binarized-preferences",),
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/rlhf.qmd",
)
def argilla_pairs(fields: Fields) -> Pair:
    """An instruction, a chosen and a rejected response, and their ratings as
    rewards.
    """
    return Pair(
        fields["instruction"],
        fields["chosen_response"],
        fields["rejected_response"],
        chosen_reward=fields.get("chosen_avg_rating"),
        rejected_reward=fields.get("rejected_avg_rating"),
    )


@form(
    "preference",
    {"input": text, "chosen": text, "rejected": text, "status": text},
    leaves=(
        "generations",
        "order",
        "labelling_model",
        "labelling_prompt",
        "raw_labelling_response",
        "rating",
        "rationale",
        "original_chosen",
        "original_rejected",
        "chosen_score",
        "in_gsm8k_train",
    ),
    as_chat=True,
    sets=("argilla/distilabel-intel-orca-dpo-pairs",),
    source="https://github.com/jondurbin/bagel/blob/main/bagel/data_sources/orca_dpo_pairs.py",
)
def distilabel_orca_pairs(fields: Fields) -> Pair | Drop:
    """A question, a chosen and a rejected answer; a pair with the status tie is
    dropped.
    """
    if fields["status"] == "tie":
        return Drop("tie", "status tie")
    return Pair(fields["input"], fields["chosen"], fields["rejected"])


# Messages


@form(
    "preference",
    {"messages": question, "chosen": answer, "rejected": answer},
    without=("prompt",),
    as_chat=True,
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/rlhf.qmd",
)
@form(
    "preference",
    {"messages": question, "chosen_response": answer, "rejected_response": answer},
    without=("prompt",),
    as_chat=True,
    sets=("nvidia/When2Call",),
    source="https://github.com/NVIDIA/When2Call",
)
@form(
    "preference",
    {"conversations": question, "chosen": answer, "rejected": answer},
    without=("prompt",),
    as_chat=True,
    sets=("llamafactory/DPO-En-Zh-20k", "m-a-p/COIG-P"),
    source="https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md",
)
@form(
    "preference",
    {"trajectory": question, "chosen": answer, "rejected": answer},
    leaves=("task", "dataset", "id", "parent_id"),
    as_chat=True,
    sets=("openbmb/UltraInteract_pair",),
    source="https://github.com/allenai/open-instruct/blob/main/scripts/data/preferences/ultrainteract.py",
)
@form(
    "preference",
    {
        "input.messages": messages,
        "preferred_output": messages,
        "non_preferred_output": messages,
    },
    optional={"input.tools": anything},
    leaves=("input.parallel_tool_calls",),
    source="https://developers.openai.com/api/docs/guides/direct-preference-optimization",
)
@form(
    "preference",
    {"context": messages, "chosen.text": text, "rejected.text": text},
    leaves=("chosen.role", "rejected.role"),
    turns={"text": "content"},
    source="https://github.com/modelscope/ms-swift/blob/main/swift/dataset/dataset/llm.py",
)
@form(
    "preference",
    {"conversation_input": question, "chosen.answer": text, "reject.answer": text},
    leaves=("pair_uid", "category_path", "chosen.llm_name", "reject.llm_name"),
    turns={"language": None},
    source="https://github.com/Zhou-Zoey/RMB-Reward-Model-Benchmark",
)
def chat_pairs(fields: Fields) -> Pair:
    """Messages up to a question, a better and a worse answer, and tools where there are
    any.
    """
    prompt = first_present(
        fields,
        "messages",
        "conversations",
        "trajectory",
        "input.messages",
        "context",
        "conversation_input",
    )
    chosen = first_present(
        fields,
        "chosen",
        "chosen_response",
        "preferred_output",
        "chosen.text",
        "chosen.answer",
    )
    rejected = first_present(
        fields,
        "rejected",
        "rejected_response",
        "non_preferred_output",
        "rejected.text",
        "reject.answer",
    )
    return Pair(prompt, chosen, rejected, tools=fields.get("input.tools"))


@form(
    "preference",
    {"chosen_messages": chat, "rejected_messages": chat},
    leaves=("extra_info", "_dataset_name"),
    source="https://github.com/hiyouga/LLaMA-Factory/blob/main/data/v1_dpo_demo.jsonl",
)
@form(
    "preference",
    {"chosen_conversations": chat, "rejected_conversations": chat},
    source="https://github.com/pytorch/torchtune/blob/main/docs/source/basics/preference_datasets.rst",
)
@form(
    "preference",
    {
        "chosen": chat,
        "rejected": chat,
        "original_response": text,
        "new_generations": texts,
    },
    leaves=("prompt", "conversation", "generation_prompt", "raw_generation_responses"),
    sets=("argilla/distilabel-capybara-dpo-7k-binarized",),
    source="https://huggingface.co/datasets/argilla/distilabel-capybara-dpo-7k-binarized",
)
@form(
    "preference",
    {
        "chosen": chat,
        "rejected": chat,
        "generations": texts,
        "conversations": chat,
        "rating": numbers,
    },
    leaves=(
        "prompt",
        "input",
        "rm",
        "rationale",
        "raw_generation_responses",
        "generation_prompt",
        "generation_model",
        "views",
        "custom_instruction",
    ),
    sets=("argilla/OpenHermes2.5-dpo-binarized-alpha",),
    source="https://huggingface.co/datasets/argilla/OpenHermes2.5-dpo-binarized-alpha/blob/main/README.md",
)
@form(
    "preference",
    {"chosen": chat, "rejected": chat, "prompt": text, "question": text},
    leaves=("source",),
    sets=("mlabonne/orpo-dpo-mix-40k",),
    source="https://huggingface.co/datasets/mlabonne/orpo-dpo-mix-40k",
)
@form(
    "preference",
    {
        "chosen": chat,
        "rejected": chat,
        "all_generated_responses": texts,
        "all_rm_scores": numbers,
    },
    leaves=("prompt", "prompt_id"),
    sets=(
        "princeton-nlp/llama3-ultrafeedback",
        "snorkelai/Snorkel-Mistral-PairRM-DPO-Dataset",
    ),
    source="https://github.com/princeton-nlp/SimPO/blob/main/on_policy_data_gen/reward_model_annotate.py",
)
@form(
    "preference",
    {
        "chosen": chat,
        "rejected": chat,
        "candidates_completions": texts,
        "ranks": numbers,
    },
    leaves=(
        "prompt",
        "source",
        "category",
        "candidate_policies",
        "chosen_policy",
        "rejected_policy",
        "rank_str",
    ),
    sets=("argilla/OpenHermesPreferences",),
    source="https://github.com/mlfoundations/evalchemy/blob/main/dcft/data_strategies/OH_preferences/utils.py",
)
@form(
    "preference",
    {"chosen": chat, "rejected": chat, "instruction": text, "responses": texts},
    leaves=(
        "rewards*",
        "gen_*_configs",
        "input_quality",
        "difficulty",
        "quality_explanation",
        "intent",
        "knowledge",
        "*task_category",
        "*_length",
    ),
    sets=(
        "Magpie-Align/Magpie-Pro-DPO-100K-v0.1",
        "Magpie-Align/Magpie-Air-DPO-100K-v0.1",
        "Magpie-Align/Magpie-Llama-3.1-Pro-DPO-100K-v0.1",
    ),
    source="https://huggingface.co/datasets/Magpie-Align/Magpie-Pro-DPO-100K-v0.1",
)
def dialogue_pairs(fields: Fields) -> Pair:
    """Two whole dialogues, split where they begin to differ, and their ratings if there
    are any.
    """
    return Pair(
        None,
        first_present(fields, "chosen", "chosen_messages", "chosen_conversations"),
        first_present(
            fields, "rejected", "rejected_messages", "rejected_conversations"
        ),
    )
