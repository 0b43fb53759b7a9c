"""Whole dialogues to learn, under names and in layouts of their own."""

from __future__ import annotations

from packstore.tokenizer.records.forms import Fields, form
from packstore.tokenizer.records.forms.helpers import (
    first_present,
    join_texts,
    questions_and_answers,
    texts_as_messages,
)
from packstore.tokenizer.records.reading import Chat, Drop
from packstore.tokenizer.records.types import (
    anything,
    chat,
    messages,
    number,
    text,
    texts,
)

OWN_CHATS = ("messages", "conversations", "chosen")
"""Packstore's own names: a record that has one of them is read by it."""

LEFT_BY_MAGPIE = (
    "instruction",
    "response",
    "gen_input_configs",
    "gen_response_configs",
    "instruct_reward",
    "reward_model",
    "llama_guard_2",
    "quality*",
    "difficulty*",
    "intent",
    "knowledge",
    "explanation",
    "*task_category",
    "*_generator",
    "min_neighbor_distance",
    "min_similar_uuid",
    "repeat_count",
    "pre_query_template",
    "*_length",
)
"""Columns that describe the question, and copies of the first round."""

LEFT_BY_MAGPIE_ULTRA = (
    "category",
    "conversation_tokens",
    "difficulty",
    "distilabel_metadata",
    "embedding",
    "explanation",
    "guard",
    "instruction",
    "intent",
    "knowledge",
    "model_name_*",
    "nn_*",
    "other_tags",
    "primary_tag",
    "system_prompt_key",
)


@form(
    "sft",
    {"conversation": chat},
    without=(*OWN_CHATS, "response", "completion"),
    leaves=(
        "conversation_id",
        "detoxify_moderation",
        "hashed_ip",
        "header",
        "openai_moderation",
        "redacted",
        "state",
        "toxic",
        "turn",
    ),
    turns={
        "country": None,
        "created": None,
        "hashed_ip": None,
        "header": None,
        "ip": None,
        "language": None,
        "openai_id": None,
        "redacted": None,
        "state": None,
        "system_fingerprint": None,
        "temperature": None,
        "timestamp": None,
        "token_counter": None,
        "top_p": None,
        "toxic": None,
        "turn_identifier": None,
        "usage": None,
    },
    sets=("lmsys/lmsys-chat-1m", "allenai/WildChat-1M", "allenai/WildChat-4.8M"),
    source="https://github.com/allenai/open-instruct/blob/main/scripts/data/sft/lmsys_chat.py",
)
@form(
    "sft",
    {"text": chat},
    without=OWN_CHATS,
    leaves=("prompt",),
    sets=("tomg-group-umd/GenQA",),
    source="https://github.com/modelscope/ms-swift/blob/main/swift/dataset/data/dataset_info.json",
)
@form(
    "sft",
    {"chat_rounds": chat},
    without=OWN_CHATS,
    sets=("codefuse-ai/CodeExercise-Python-27k",),
    source="https://github.com/modelscope/ms-swift/blob/main/swift/dataset/dataset/llm.py",
)
def conversation(fields: Fields) -> Chat:
    """One dialogue as messages."""
    return Chat(messages=first_present(fields, "conversation", "text", "chat_rounds"))


@form(
    "sft",
    {"conversations": chat, "input_quality": text},
    leaves=LEFT_BY_MAGPIE,
    sets=(
        "Magpie-Align/Magpie-Pro-300K-Filtered",
        "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
        "Magpie-Align/Magpie-Llama-3.1-Pro-MT-300K-Filtered",
    ),
    source="https://huggingface.co/datasets/Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
)
@form(
    "sft",
    {"conversation": chat, "quality": text, "reward_model_score": number},
    leaves=LEFT_BY_MAGPIE_ULTRA,
    sets=("argilla/magpie-ultra-v1.0",),
    source="https://github.com/huggingface/smollm/blob/main/text/data/smoltalk/magpie_ultra_v1/pipeline.py",
)
@form(
    "sft",
    {"messages": chat, "quality": text, "reward_model_score": number},
    leaves=LEFT_BY_MAGPIE_ULTRA,
    sets=("HuggingFaceTB/smoltalk", "argilla/magpie-ultra-v1.0"),
    source="https://huggingface.co/datasets/HuggingFaceTB/smoltalk",
)
def magpie(fields: Fields) -> Chat:
    """One dialogue as messages; the qualities and scores beside it are left, as it was
    filtered.
    """
    return Chat(
        messages=first_present(fields, "messages", "conversations", "conversation")
    )


@form(
    "sft",
    {"conversations": chat, "label": anything, "langdetect": text},
    sets=("BAAI/Infinity-Instruct",),
    source="https://github.com/modelscope/ms-swift/blob/main/swift/dataset/data/dataset_info.json",
)
def infinity_instruct(fields: Fields) -> Chat:
    """One dialogue as messages; its label, which names abilities, is left."""
    return Chat(messages=fields["conversations"])


@form(
    "sft",
    {"conversations": chat, "tools": anything, "subcategory": text, "task": text},
    leaves=("tools", "category"),
    sets=("NousResearch/hermes-function-calling-v1",),
    source="https://huggingface.co/datasets/NousResearch/hermes-function-calling-v1",
)
def hermes_function_calling(fields: Fields) -> Chat:
    """One dialogue as messages; its tools are left, as the system turn holds them."""
    return Chat(messages=fields["conversations"])


@form(
    "sft",
    {"uuid": text, "generator": text, "reasoning": text, "messages": chat},
    optional={"tools": anything, "metadata.tools": anything},
    sets=(
        "nvidia/Nemotron-Post-Training-Dataset-v1",
        "nvidia/Nemotron-Post-Training-Dataset-v2",
    ),
    source="https://huggingface.co/datasets/nvidia/Nemotron-Post-Training-Dataset-v1",
)
def nemotron(fields: Fields) -> Chat:
    """One dialogue as messages, with the tools that stand in its metadata."""
    tools = first_present(fields, "tools", "metadata.tools")
    return Chat(messages=fields["messages"], tools=tools)


@form(
    "sft",
    {"problem": text, "solution": text, "messages": chat},
    leaves=("source",),
    sets=("AI-MO/NuminaMath-CoT",),
    source="https://github.com/allenai/open-instruct/blob/main/scripts/data/sft/numinamath.py",
)
@form(
    "sft",
    {"problem": text, "solution": text, "generations": texts, "messages": chat},
    leaves=(
        "answer",
        "correctness*",
        "finish_reasons",
        "is_reasoning_complete",
        "problem_type",
        "question_type",
        "source",
    ),
    sets=("open-r1/OpenR1-Math-220k",),
    source="https://huggingface.co/datasets/open-r1/OpenR1-Math-220k",
)
@form(
    "sft",
    {"problem": text, "solution": text, "messages": chat, "reannotated_messages": chat},
    leaves=("reannotated_assistant_content", "quality_metrics", "verified"),
    sets=("ServiceNow-AI/R1-Distill-SFT",),
    source="https://github.com/modelscope/ms-swift/blob/main/swift/dataset/data/dataset_info.json",
)
def problem_as_messages(fields: Fields) -> Chat:
    """A problem and its solution as messages; their texts and further solutions are
    left.
    """
    return Chat(messages=first_present(fields, "reannotated_messages", "messages"))


@form(
    "sft",
    {"conversation[].human": texts, "conversation[].assistant": texts},
    without=OWN_CHATS,
    as_chat=True,
    source="https://github.com/modelscope/ms-swift/blob/main/docs/source_en/Customization/Custom-dataset.md",
)
@form(
    "sft",
    {"conversation[].input": texts, "conversation[].output": texts},
    without=OWN_CHATS,
    leaves=("source",),
    as_chat=True,
    sets=("LDJnr/Capybara",),
    source="https://github.com/jondurbin/bagel/blob/main/bagel/data_sources/capybara.py",
)
def conversation_rounds(fields: Fields) -> Chat:
    """One dialogue as rounds, each an object with a question and an answer."""
    questions = first_present(fields, "conversation[].human", "conversation[].input")
    answers = first_present(fields, "conversation[].assistant", "conversation[].output")
    return Chat(messages=questions_and_answers(questions, answers))


@form(
    "sft",
    {"conversations": texts},
    without=("messages", "chosen"),
    leaves=("source",),
    as_chat=True,
    sets=("GAIR/lima",),
    source="https://github.com/allenai/open-instruct/blob/main/scripts/data/sft/lima.py",
)
@form(
    "sft",
    {"id": anything, "data": texts},
    without=OWN_CHATS,
    as_chat=True,
    sets=("openbmb/UltraChat",),
    source="https://github.com/thunlp/UltraChat",
)
def alternating_texts(fields: Fields) -> Chat:
    """One dialogue as texts: a question, its answer, the next question, and so on."""
    return Chat(
        messages=texts_as_messages(first_present(fields, "conversations", "data"))
    )


@form(
    "sft",
    {"contents": messages},
    optional={
        "systemInstruction.parts[].text": texts,
        "system_instruction.parts[].text": texts,
    },
    without=("messages", "prompt", "chosen"),
    turns={"parts": "content"},
    source="https://cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-about",
)
def gemini_contents(fields: Fields) -> Chat:
    """One dialogue of Gemini: contents of parts, and a system instruction."""
    system = first_present(
        fields, "systemInstruction.parts[].text", "system_instruction.parts[].text"
    )
    return Chat(
        messages=fields["contents"], system=join_texts(*system) if system else None
    )


@form(
    "sft",
    {"schemaVersion": text, "messages": messages},
    optional={"system[].text": texts},
    leaves=("system",),
    source="https://docs.aws.amazon.com/bedrock/latest/userguide/preparing-text-data.html",
)
def bedrock_conversation(fields: Fields) -> Chat:
    """One dialogue of Amazon Bedrock, with system texts beside it."""
    system = fields.get("system[].text")
    return Chat(
        messages=fields["messages"], system=join_texts(*system) if system else None
    )


@form(
    "sft",
    {"conversations": chat, "mask": text},
    without=("messages",),
    leaves=("type", "dataset"),
    turns={"label": None},
    sets=("nvidia/Daring-Anteater", "nvidia/sft_datablend_v1"),
    source="https://github.com/allenai/open-instruct/blob/main/scripts/data/sft/daring_anteater.py",
)
def nemo_chat(fields: Fields) -> Chat | Drop:
    """One dialogue of NeMo; turns of the role that mask names are not learned."""
    if fields["mask"] == "Assistant":
        return Drop("unsupervised", "mask 'Assistant': no answer is to be learned")
    return Chat(messages=fields["conversations"])
