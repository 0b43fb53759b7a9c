"""Structures that other forms, or packstore's own names, would read against their
meaning.
"""

from __future__ import annotations

from packstore.tokenizer.records.forms import refused
from packstore.tokenizer.records.types import anything, messages, question, text, turns

# Prompts without an answer to learn, and answers that nothing chooses between

refused(
    "prompt_and_ground_truth",
    {"messages": question, "ground_truth": anything},
    "it has a prompt and no answer, as a verifier is to judge answers that a model "
    "makes; "
    "learn the ground truth, where it is text, with --field prompt=messages "
    "--field response=ground_truth --kind sft",
    sets=("allenai/RLVR-GSM",),
    source="https://github.com/allenai/open-instruct",
)
refused(
    "gemini_reinforcement",
    {"contents": messages, "references": anything},
    "it has a prompt and no answer, as a reward is to judge answers that a model "
    "makes; "
    "write the answers to learn beside the prompts, or read them with "
    "--adapter FILE.py:FUNCTION",
    source="https://googleapis.github.io/js-genai/release_docs/interfaces/types.ReinforcementTuningExample.html",
)
refused(
    "gemini_tools",
    {"contents": messages, "tools": anything},
    "its tools are function declarations of Gemini, which chat templates do not "
    "render; convert "
    "them with --adapter FILE.py:FUNCTION, or leave them out with --ignore tools",
    source="https://docs.cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-prepare",
)

refused(
    "multiple_choice",
    {"question": text, "options": anything, "answer": text},
    "its answer is one of options that stand apart from the question; write them into "
    "the prompt "
    "with --adapter FILE.py:FUNCTION, or, if the question holds them, use --ignore "
    "options",
    sets=("TIGER-Lab/MMLU-Pro",),
    source="https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro",
)
refused(
    "multiple_choice_of_choices",
    {"question": text, "choices": anything, "answer": text},
    "its answer is one of choices that stand apart from the question; write them into "
    "the prompt "
    "with --adapter FILE.py:FUNCTION, or, if the question holds them, use --ignore "
    "choices",
    sets=("SeaEval/cmmlu",),
    source="https://huggingface.co/datasets/SeaEval/cmmlu",
)
refused(
    "reference_and_model_answer",
    {"question": text, "answer": text, "model_answer": text},
    "answer is a reference, and model_answer one of a model that nothing judges; learn "
    "the one "
    "that is right with --ignore model_answer, or with --field prompt=question "
    "--field response=model_answer --kind sft",
    source="https://github.com/lamini-ai/lamini-examples",
)
refused(
    "alpaca_reflection",
    {"instruction": text, "output": text, "reflection": text, "corrected": text},
    "it has an answer, a reflection upon it, and a corrected answer; learn the first "
    "with "
    "--ignore reflection --ignore corrected, or write what is to be learned with "
    "--adapter FILE.py:FUNCTION",
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/dataset-formats/inst_tune.qmd",
)

# Pairs

refused(
    "step_dpo",
    {"prompt": text, "initial_reason_steps": text, "chosen": text, "rejected": text},
    "its sides are single steps, which follow initial_reason_steps. Learn whole "
    "solutions "
    "(--field chosen=full_chosen --field rejected=full_rejected), or join the steps to "
    "the prompt "
    "(--adapter FILE.py:FUNCTION)",
    sets=("xinlai/Math-Step-DPO-10K",),
    source="https://github.com/dvlab-research/Step-DPO/blob/main/train.py",
)
refused(
    "trl_triple_preference",
    {"prompt": turns, "reference": turns, "chosen": turns, "rejected": turns},
    "its third answer, reference, has no place in a pair. Leave it out (--ignore "
    "reference), or "
    "give all three a score (--adapter FILE.py:FUNCTION)",
    source="https://github.com/huggingface/trl/blob/main/docs/source/tpo_trainer.md",
)
