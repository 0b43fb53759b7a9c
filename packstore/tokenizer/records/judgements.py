"""Closed lists of names and words that mean something in every set, for columns that
nothing reads.

Names are compared as a whole, as :func:`fold` writes them; inside objects the last key
is compared. A table maps a row of names to its sources: public sets or trainers, mostly
two or more, that use them with this meaning. Most rows of judgements were read on the
cards of these sets, or in code that writes or reads them; rows of weights, histories,
system prompts and media also follow common usage. Anything else that a record holds is
announced with its value, and does not stop a job.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SEPARATORS = re.compile(r"[\W_]+")


@functools.lru_cache(maxsize=10_000)
def fold(name: str) -> str:
    """Return a name in small letters with ``_`` between its words: ``passRate``,
    ``Pass-rate``.
    """
    return _SEPARATORS.sub("_", _WORD_BOUNDARY.sub("_", name)).strip("_").casefold()


JUDGEMENTS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("label", "labels"): (
        "trl-lib/kto-mix-14k",
        "argilla/kto-mix-15k",
        "stanfordnlp/SHP",
        "trl-lib/math_shepherd",
    ),
    ("kto_tag", "is_chosen", "desirable", "is_desirable"): (
        "LLaMA-Factory",
        "HALOs",
        "packstore's own names of a score",
    ),
    ("score", "scores"): (
        "BAAI/JudgeLM-100K",
        "mlabonne/FineTome-100k",
        "distilabel",
        "jdchang/ultrafeedback-llama-3.1-8b-general-armo",
    ),
    ("reward", "rewards"): (
        "togethercomputer/CoderForge-Preview",
        "OpenRLHF",
        "TRL (logged completions)",
        "Verifiers",
    ),
    ("rating", "ratings"): (
        "argilla/distilabel-intel-orca-kto",
        "manishiitg/llm_judge",
        "distilabel",
    ),
    ("rank", "ranks", "ranking"): (
        "berkeley-nest/Nectar",
        "OpenAssistant/oasst2",
        "argilla/OpenHermesPreferences",
        "mlfoundations-dev/test_time_alpaca",
    ),
    ("winner",): (
        "lmsys/chatbot_arena_conversations",
        "lmarena-ai/arena-human-preference-140k",
    ),
    ("preference", "overall_preference", "preference_strength"): (
        "tatsu-lab/alpaca_farm",
        "kursathalat/ranking_ds",
        "nvidia/HelpSteer3",
        "nvidia/HelpSteer2",
    ),
    (
        "chosen",
        "rejected",
        "chosen_response",
        "rejected_response",
        "rejected_messages",
    ): (
        "HuggingFaceH4/ultrafeedback_binarized",
        "Anthropic/hh-rlhf",
        "TRL",
        "ms-swift",
    ),
    ("verdict", "final_verdict", "majority_verdict"): (
        "CodeShield/ccplus-rerank",
        "TAUR-dev/D-reflection_accuracy_commonsenseQA_longmult_3dig_10ex",
    ),
    ("judgement", "judgment"): (
        "nvidia/OpenCodeReasoning-2",
        "manishiitg/llm_judge",
        "SP2001/FRAMES_judge_passed_unique_questions",
    ),
    ("thumbs", "thumbs_up", "thumbs_down"): (
        "Jellywibble/20231007_chai_prize_model_feedback_all",
        "ChaiML/20231012_chai_prize_reward_model_data",
        "feedback endpoints of chat services",
    ),
    ("feedback",): (
        "Jellywibble/20231007_chai_prize_model_feedback_all",
        "prometheus-eval/Feedback-Collection",
        "flowaicom/Flow-Judge-v0.1-5-likert-heldout",
    ),
    ("upvotes",): ("wangrui6/Zhihu-KOL", "bzb2023/Zhihu-KOL-More-Than-100-Upvotes"),
    ("is_correct",): (
        "nvidia/OpenMathInstruct-1",
        "minyichen/Instruct_following_R1",
        "reasoning-course/supervised-finetuning_quiz_student_responses",
    ),
    ("correct",): (
        "geodesic-research/Dolci-Instruct-SFT-Python-Correct",
        "imoxto/prompt_injection_cleaned_dataset",
    ),
    ("correctness",): (
        "nvidia/HelpSteer",
        "nvidia/HelpSteer2",
        "Windy0822/ultrainteract_math_rollout",
    ),
    ("helpfulness", "honesty", "truthfulness", "coherence"): (
        "nvidia/HelpSteer",
        "nvidia/HelpSteer2",
        "openbmb/UltraFeedback",
    ),
    ("quality", "quality_score"): (
        "argilla/magpie-ultra-v0.1",
        "DuarteMRAlves/persona_instruct_2shot_converted",
        "chrisgru/r_ro_quality_small",
    ),
    ("average_rating", "avg_rating"): (
        "argilla/ultrafeedback-binarized-preferences-cleaned-kto",
        "argilla/10k_prompts_ranked_mistral_large_responses",
    ),
    (
        "overall_score",
        "reward_score",
        "reward_model_score",
        "judge_score",
        "gpt_score",
    ): (
        "openbmb/UltraFeedback",
        "argilla/magpie-ultra-v1.0",
        "med-llm-judge/Jeslyn_Test_Scalar",
        "mcding-org/CorrectDPO-Eval-DPO_L8B_U0_beta0.10",
        "DialogueCharacter/english_general_instruction_with_reward_score_judged_by_13B_llama2",
    ),
    ("pm_score",): (
        "HuggingFaceH4/stack-exchange-preferences",
        "HuggingFaceH4/pmp-se-test-dataset",
    ),
    ("is_safe",): ("PKU-Alignment/BeaverTails", "PKU-Alignment/PKU-SafeRLHF-QA"),
    ("better_response_id", "safer_response_id"): (
        "PKU-Alignment/PKU-SafeRLHF",
        "PKU-Alignment/PKU-SafeRLHF-10K",
    ),
    ("accepted",): ("Vezora/Code-Preference-Pairs", "mmmanuel/m1_preference_data"),
    ("pass_rate",): ("TIGER-Lab/AceCode-87K", "nvidia/OpenCodeReasoning-2"),
    ("passed", "pass"): (
        "RealSilvia/grpo-results",
        "CodeDPO/AceCoder-SFT-500-DeepSeek-R1",
        "openai/human-eval",
    ),
    ("resolved", "is_resolved", "solved"): (
        "SWE-bench/SWE-smith-trajectories",
        "JetBrains-Research/swe-traj-openai",
        "cchoi1/sft_o4-mini_v2_code_only",
    ),
    ("success",): ("preetbiswas12/meta-scaler", "Hoshipu/reflex-b1k-task1-2f"),
    ("total_reward", "final_score"): (
        "preetbiswas12/meta-scaler",
        "Chisatozt/travel-grpo-longhorizon",
    ),
    ("advantage", "advantages"): ("TRL (logged completions)", "NeMo-RL"),
}
"""Names of columns that judge an answer -> sets and trainers that use them so."""

LABELS = frozenset(("label", "kto_tag", "is_chosen", "desirable", "is_desirable"))
"""Names of labels that call a single answer good or bad."""

WEIGHTS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("weight", "weights"): (
        "Fireworks",
        "gohsyi/Llama-3.2-3B-Instruct-ultrafeedback-4k-overweight",
        "KID-22/LLM-SBM",
    ),
    ("sample_weight", "sample_weights"): (
        "scikit-learn",
        "Keras",
        "SageMaker Autopilot",
    ),
    ("example_weight", "instance_weight", "importance_weight", "importance"): (
        "ML.NET",
        "BigQuery ML",
    ),
    ("loss_weight", "loss_weights", "training_weight"): (
        "LLaMA-Factory",
        "Yousifus/rlhf_loop_humain",
    ),
}
"""Names of columns with the weight of an example in the loss -> where they are used."""

MEDIA: Mapping[tuple[str, ...], tuple[str, ...]] = {
    (
        "image",
        "images",
        "image_path",
        "image_paths",
        "image_url",
        "image_urls",
        "image_list",
    ): (
        "LLaMA-Factory",
        "ms-swift",
        "TRL",
        "LLaVA",
    ),
    ("video", "videos", "video_path", "video_paths", "video_url", "video_urls"): (
        "LLaMA-Factory",
        "ms-swift",
    ),
    ("audio", "audios", "audio_path", "audio_paths", "audio_url", "audio_urls"): (
        "LLaMA-Factory",
        "ms-swift",
    ),
    ("rejected_images", "rejected_videos", "rejected_audios"): (
        "ms-swift",
        "LLaMA-Factory",
    ),
    ("pixel_values",): ("transformers", "TRL"),
}
"""Names of columns with pictures, films or sounds, or with their places."""

HISTORIES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    (
        "history",
        "chat_history",
        "conversation_history",
        "dialogue_history",
        "dialog_history",
    ): (
        "LLaMA-Factory",
        "ms-swift",
        "qnguyen3/Viet-ORPO-Mix",
        "LangChain",
    ),
    ("message_history", "messages_history", "chat_log", "context_messages"): (
        "TIGER-Lab/AceCode-87K",
        "LangChain",
    ),
    (
        "past_turns",
        "previous_turns",
        "prior_turns",
        "history_turns",
        "past_messages",
        "previous_messages",
        "prior_messages",
        "past_user_inputs",
        "generated_responses",
    ): ("transformers (Conversation)", "ParlAI", "DialoGPT"),
}
"""Names of columns with earlier rounds, as a list of texts, pairs or objects."""

SYSTEM_PROMPTS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("system", "system_prompt", "system_message", "system_msg", "system_text", "sys"): (
        "Open-Orca/OpenOrca",
        "nvidia/Llama-Nemotron-Post-Training-Dataset",
        "LLaMA-Factory",
        "ms-swift",
    ),
    ("sys_prompt", "sys_message", "sys_msg"): ("axolotl", "ms-swift"),
    ("system_instruction", "system_instructions"): ("Google GenAI", "Vertex AI tuning"),
    ("developer_prompt", "developer_message", "developer_instructions", "preamble"): (
        "OpenAI",
        "Cohere",
    ),
}
"""Names of columns with a system prompt."""

MASKS = (
    "mask",
    "masks",
    "loss_mask",
    "loss_masks",
    "completion_mask",
    "response_mask",
    "assistant_mask",
    "assistant_masks",
    "token_mask",
    "train_on",
    "loss",
)
"""Names of columns that mark the tokens or turns to learn, as a list of 0 and 1."""

PLACES = (
    "attention_mask",
    "prompt_attention_mask",
    "chosen_attention_mask",
    "rejected_attention_mask",
    "completion_attention_mask",
    "position_ids",
    "seq_len",
    "seq_lens",
    "seq_lengths",
    "seqlens",
    "sequence_lengths",
    "cu_seqlens",
)
"""Names of columns with the places of sequences and padding among token ids."""

VARIABLES = ("enable_thinking", "reasoning_effort", "chat_template")
"""Names of columns that change the text that a chat template makes."""

GOOD_WORDS = (
    "good",
    "better",
    "thumbs_up",
    "thumb_up",
    "👍",
    "upvote",
    "upvoted",
    "liked",
    "pass",
    "passed",
    "accept",
    "accepted",
    "correct",
    "helpful",
    "acceptable",
    "chosen",
    "preferred",
    "desirable",
    "✅",
)
"""Words that call an answer good."""

BAD_WORDS = (
    "bad",
    "worse",
    "thumbs_down",
    "thumb_down",
    "👎",
    "downvote",
    "downvoted",
    "disliked",
    "fail",
    "failed",
    "reject",
    "rejected",
    "incorrect",
    "wrong",
    "unhelpful",
    "unacceptable",
    "dispreferred",
    "non_preferred",
    "undesirable",
    "❌",
)
"""Words that call an answer bad.

Words with other meanings need a name: true and false, yes and no, 0 and 1, positive and
negative, up and down, high and low, success and failure, safe and unsafe.
"""

IDS_AND_SOURCES = frozenset((
    "id", "ids", "idx", "index", "uid", "uuid", "guid", "key", "hash", "sha256", "md5",
    "row", "row_id", "row_idx", "row_index", "record_id", "sample_id", "example_id",
    "pair_id", "prompt_id", "question_id", "query_id", "task_id", "item_id", "data_id",
    "conversation_id", "conv_id", "dialogue_id", "session_id", "thread_id",
    "message_id", "user_id", "annotator_id", "worker_id", "rater_id", "judge_id",
    "batch_id", "index_level_0", "source", "sources", "data_source", "dataset",
    "dataset_name", "source_dataset", "subset", "split", "origin", "url", "link",
    "file", "file_name", "filename", "path",
    "model", "models", "model_name", "model_id", "generator", "engine", "provider",
    "license", "version", "language", "lang", "locale", "category", "domain", "topic",
    "created_at", "updated_at", "timestamp", "tstamp", "date", "time", "datetime",
))  # fmt: skip
"""Names of columns that cannot decide which of two answers is better."""


def names_of(table: Mapping[tuple[str, ...], tuple[str, ...]]) -> frozenset[str]:
    """Return all names of a table of names and their sources."""
    return frozenset(name for names in table for name in names)


def spellings(names: Iterable[str]) -> frozenset[str]:
    """Return folded names as small letters may spell them: ``a_b``, ``a-b``, ``a b``,
    ``ab``.
    """
    separators = ("_", "-", " ", "")
    return frozenset(name.replace("_", mark) for name in names for mark in separators)


VERDICTS: Mapping[str, float] = {
    **dict.fromkeys(spellings(GOOD_WORDS), 1.0),
    **dict.fromkeys(spellings(BAD_WORDS), 0.0),
}
"""A word of judgement in small letters -> 1 for a good answer, 0 for a bad one."""

LONGEST_WORD = max(len(word) for word in VERDICTS) + 4
"""Characters above which a text is no word of judgement, with room for space and a full
stop.
"""


def fold_word(text: str) -> str:
    """Return a short text in small letters, without spaces and a full stop at
    its ends.
    """
    return text.strip(" \t\r\n.!").casefold()


def verdict_of(text: str) -> float | None:
    """Return 1 or 0 for a text that is a word of judgement as a whole, else None."""
    if len(text) > LONGEST_WORD:
        return None
    return VERDICTS.get(fold_word(text))
